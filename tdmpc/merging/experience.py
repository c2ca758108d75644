"""What workers share of their experience: finished episodes, each given once and taken once by every other worker."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tdmpc.merging.exchange import Exchange
from tdmpc.merging.messages import Header, UnusableMessage
from tdmpc.merging.strategies import State


class Episodes(Protocol):
    """Where the episodes of this worker come from, and those of others go; what they are is its own business."""

    def finished(self) -> dict[str, Tensor]:
        """Return the episodes that have ended since those that were `given`."""
        ...

    def given(self) -> None:
        """Take note that the others have got what `finished` returns."""
        ...

    def problem(self, episodes: State) -> str | None:
        """Return why what another worker gives cannot be taken, with its message as the subject."""
        ...

    def take(self, worker: int, episodes: State) -> int:
        """Take those of a worker's episodes that were not taken before, and return how many."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what has been given and taken, in plain types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class NoExperience:
    """Keep one's experience for oneself."""

    def publish(self, header: Header) -> None:
        """Do nothing."""

    def take(self, round: int) -> dict[str, float]:
        """Take nothing."""
        return {}

    def end_round(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class Experience(NoExperience):
    """Give the others the episodes that have finished, and take theirs, one message at a time.

    Args:
        exchange: where workers meet.
        episodes: of this worker.
        worker: number of this worker.
    """

    def __init__(self, exchange: Exchange, episodes: Episodes, worker: int) -> None:
        self.exchange, self.episodes, self.worker = exchange, episodes, worker
        self._rounds: dict[int, int] = {}  # of every worker the last one whose episodes were read
        self._useless: set[tuple[int, int]] = set()  # workers and rounds that are not tried again

    def publish(self, header: Header) -> None:
        """Give what has finished since the last round that came to an end; a round that is repeated gives it again.

        Raises:
            ExchangeError: that isn't possible.
        """
        self.exchange.share(header, self.episodes.finished())

    def take(self, round: int) -> dict[str, float]:
        """Take what the others have given and return what is logged of it.

        Raises:
            ExchangeError: a collective exchange has lost a worker; what was taken until then stays, and is not taken
                again.
        """
        count = 0
        for worker, number in self.exchange.shared(round, self._rounds):
            if (worker, number) in self._useless:
                continue
            try:
                episodes = self.exchange.read_shared(worker, number, self.episodes.problem)
            except UnusableMessage:
                self._useless.add((worker, number))
                continue
            count += self.episodes.take(worker, episodes) if worker != self.worker else 0
            self._rounds[worker] = number
        return {"merge/episodes_read": count}

    def end_round(self) -> None:
        """Take note that a round in which this worker has published is over."""
        self.episodes.given()

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the sharing, in plain types."""
        return {"rounds": dict(self._rounds), "episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an empty one, of a run that did not share before, changes nothing."""
        if not state:
            return
        self._rounds = dict(state["rounds"])
        self.episodes.load_state_dict(state["episodes"])
