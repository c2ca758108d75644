"""When a worker merges, and what it merges: its state with that of its peers, in place."""

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tdmpc.merging.exchange import Exchange, ExchangeError
from tdmpc.merging.experience import NoExperience
from tdmpc.merging.messages import Header, Totals, UnusableMessage
from tdmpc.merging.strategies import RunningMean, Strategy, copy_into, distance

RECENT_EPISODES = 10
"""Training episodes whose mean return a worker tells its peers."""

LiveState = Callable[[], dict[str, Tensor]]
"""Returns the tensors that are merged: those in use, so that copying into them changes the worker; none if none are."""


class Abandoned(Exception):
    """Raised by an exchange that was told not to wait any longer."""


@dataclass(frozen=True)
class Merged:
    """Outcome of a round.

    Attributes:
        changed: whether the worker goes on with other weights than before.
        metrics: what is logged of it.
    """

    changed: bool
    metrics: Mapping[str, float]


class Rounds:
    """The numbers of rounds as a function of steps: round r is due at step `start + r * every`, from 1 on.

    No round lies beyond the end of training. So workers of different numbers of environments, whose last steps
    differ, have the same rounds.

    Args:
        start: step from which rounds are counted.
        every: steps between rounds.
        end: step at which training ends.
    """

    def __init__(self, start: int, every: int, end: int) -> None:
        self.start, self.every, self.end = start, every, end

    def until(self, step: int) -> int:
        """Return the number of the last round that is due at a step or before; 0 for none."""
        return max(min(step, self.end) - self.start, 0) // self.every

    @property
    def last(self) -> int:
        """Number of the last round."""
        return self.until(self.end)


class NoMerge:
    """Train alone."""

    collective = False
    """Whether a worker that has missed a round could not take part in the next."""

    def join(self, step: int, *, resuming: bool, overwrite: bool) -> None:
        """Do nothing."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def merge(self, step: int, updates: int, should_stop: Callable[[], bool]) -> Merged | None:
        """Change nothing."""
        return Merged(False, {})

    def observe(self, returns: Iterable[float]) -> None:
        """Do nothing."""

    def report(self, **totals: Any) -> None:
        """Do nothing."""

    def finish(self, **totals: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class Control(NoMerge):
    """Train alone, in sight of those who merge.

    Args:
        exchange: where they meet.
        announce: told what a person should know.
    """

    def __init__(self, exchange: Exchange, announce: Callable[[str], None]) -> None:
        self.exchange, self.announce = exchange, announce
        self._warned: set[str] = set()

    def join(self, step: int, *, resuming: bool, overwrite: bool) -> None:
        """Become part of the group.

        Args:
            step: of this worker.
            resuming: it continues from a checkpoint.
            overwrite: replace what an earlier experiment has left.

        Raises:
            ExchangeError: that isn't possible.
        """
        self.exchange.join(resuming, overwrite)

    def report(self, **totals: Any) -> None:
        """Tell whoever looks how far this worker is, by the fields of `Totals`."""
        self._try("not seen by the others", lambda: self.exchange.report(Totals(**totals)))

    def finish(self, **totals: Any) -> None:
        """Tell the others that this worker has done all its steps, by the fields of `Totals`."""
        self._try("the others do not see that it has finished", lambda: self.exchange.finish(Totals(**totals)))

    def close(self) -> None:
        """Leave."""
        self.exchange.close()

    def _try(self, consequence: str, action: Callable[[], None]) -> bool:
        """Do what may fail without harm; say once that it did, and tell whether it didn't."""
        try:
            action()
        except ExchangeError as error:
            if consequence not in self._warned:
                self._warned.add(consequence)
                self.announce(f"warning: merging: {consequence} ({error})")
            return False
        return True


class Merger(Control):
    """Merge with the others, round by round.

    In a round a worker publishes its state, reads those of the others, and takes over what its strategy makes of
    their mean. One that finds nobody's state but its own stays as it is. Where experience is shared, it gives and takes
    episodes besides. Where it cannot publish, because a disk is full or gone, it trains on and tries again in the next
    round; a collective exchange has no next round without it.

    Args:
        exchange: where workers meet.
        strategy: what becomes of their states.
        live: returns the state that is merged.
        rounds: when.
        worker: number of this worker.
        announce: told what a person should know.
        section: brackets the parts of a round by name, for whoever wants to measure them.
        common_start: whether all workers begin with the same state.
        collective: whether the exchange needs all workers in every round.
        experience: what is shared of it.
    """

    def __init__(
        self,
        exchange: Exchange,
        strategy: Strategy,
        live: LiveState,
        rounds: Rounds,
        worker: int,
        *,
        announce: Callable[[str], None],
        section: Callable[[str], AbstractContextManager[Any]],
        common_start: bool,
        collective: bool,
        experience: NoExperience | None = None,
    ) -> None:
        super().__init__(exchange, announce)
        self.strategy, self.live, self.rounds, self.worker = strategy, live, rounds, worker
        self.section, self.common_start, self.collective = section, common_start, collective
        self.experience = experience or NoExperience()
        self.round: int | None = None  # the last one that is over; None before `join` where it never began
        self._returns: deque[float] = deque(maxlen=RECENT_EPISODES)
        self._heard: dict[int, tuple[int, int]] = {}  # steps and updates of every worker, as last heard of

    def join(self, step: int, *, resuming: bool, overwrite: bool) -> None:
        """Become part of the group, in the round that it is in; see `Control.join`."""
        if self.round is None:
            self.round = self.rounds.until(step)
            if self.common_start:
                self.strategy.begin(self.live())
        if self.collective and self.round == self.rounds.last:
            return  # the others may have ended, and there is nothing to meet for
        self.exchange.join(resuming, overwrite)
        reached = self.exchange.reached(self.round)
        if reached > self.round:
            self.announce(f"merging: the others are past round {self.round + 1}; merging again from {reached + 1} on")
        self.round = reached

    def due(self, step: int) -> bool:
        """Tell whether a round is due at a step."""
        return self.round is not None and self.rounds.until(step) > self.round

    def merge(self, step: int, updates: int, should_stop: Callable[[], bool]) -> Merged | None:
        """Go through the round that is due.

        Args:
            step: of this worker.
            updates: of its weights.
            should_stop: whether this worker is to stop.

        Returns:
            What came of it. None if a stop broke it off: it is still due, and no weights have changed.

        Raises:
            ExchangeError: a collective exchange has lost a worker; here too no weights have changed.
        """
        number, live = self.rounds.until(step), self.live()
        header = Header(self.worker, number, step, updates, self._recent_return())
        try:
            with self.section("publish"):
                published = self._publish(header, live)
            merged = self._meet(number, live) if published else Merged(False, {})
        except Abandoned:
            return None
        except ExchangeError:  # the others may have been told to stop as well
            if should_stop():
                return None
            raise
        if published:
            self.experience.end_round()
        self.round = number
        return merged

    def observe(self, returns: Iterable[float]) -> None:
        """Take note of the returns of training episodes."""
        self._returns.extend(returns)

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the merging: tensors and plain types."""
        return {
            "round": self.round,
            "returns": list(self._returns),
            "heard": {worker: list(counts) for worker, counts in self._heard.items()},
            "strategy": self.strategy.state_dict(),
            "experience": self.experience.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an empty one, of a run that did not merge before, changes nothing."""
        if not state:
            return
        self.round = state["round"]
        self._returns.extend(state["returns"])
        self._heard = {worker: (steps, updates) for worker, (steps, updates) in state["heard"].items()}
        self.strategy.load_state_dict(state["strategy"])
        self.experience.load_state_dict(state.get("experience", {}))  # not in runs from before there was sharing

    def _recent_return(self) -> float | None:
        return statistics.fmean(self._returns) if self._returns else None

    def _publish(self, header: Header, live: Mapping[str, Tensor]) -> bool:
        def publish() -> None:
            self.experience.publish(header)
            self.exchange.publish(header, live)

        if self.collective:
            publish()
            return True
        return self._try("training goes on without", publish)

    def _meet(self, number: int, live: Mapping[str, Tensor]) -> Merged:
        with self.section("wait"):
            headers = self.exchange.headers(number)
        with self.section("read"):
            mean, present = self._mean(headers)
            taken = self.experience.take(number)
        self._heard |= {header.worker: (header.step, header.updates) for header in headers}
        peers = [worker for worker in present if worker != self.worker]
        metrics = self._metrics(number, len(peers)) | taken
        if not peers or not live:
            return Merged(False, metrics)
        with self.section("apply"):
            merged = self.strategy.step(live, mean.result())
            moved = distance(live, merged)
            copy_into(live, merged)
        return Merged(True, metrics | {"merge/distance": moved})

    def _mean(self, headers: Collection[Header]) -> tuple[RunningMean, list[int]]:
        """Return the mean of the messages that can be used, and whose they are."""
        mean, present = RunningMean(), []
        weights = self.strategy.weights([header.recent_return for header in headers])
        for header, weight in zip(headers, weights, strict=True):
            try:
                mean.add(self.exchange.read(header), weight)
            except UnusableMessage:
                continue
            present.append(header.worker)
        return mean, present

    def _metrics(self, number: int, peers: int) -> dict[str, float]:
        costs = self.exchange.take_costs()
        steps, updates = zip(*self._heard.values(), strict=True)
        return {
            "merge/round": number,
            "merge/peers": peers,
            "merge/skipped": costs.skipped,
            "merge/wait_s": costs.wait_s,
            "merge/read_bytes": costs.read_bytes,
            "merge/group_steps": sum(steps),
            "merge/group_updates": sum(updates),
        }
