"""How workers of one `torchrun` meet: over the network, all at the same time, by `torch.distributed`."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tdmpc.keys import shown
from tdmpc.merging.exchange import Costs, ExchangeError, Problem, differing_names, partner
from tdmpc.merging.messages import EPISODES, WEIGHTS, Header, Totals, UnusableMessage, not_finite
from tdmpc.merging.strategies import State, difference, layout_of

_WATCHDOG_S = 60.0  # how much later than this class NCCL gives up; it ends the process


class TorchDistributed:
    """Meet over the network: by gloo, tensors on a GPU by NCCL.

    Everything is collective: all members join, and go through the same rounds; none may end before the others, be
    missing, or come back. Only the members connect, so a worker that doesn't merge needs to do nothing.

    Args:
        worker: number of this worker.
        members: numbers of all workers that merge, this one included.
        fingerprint: what has to be equal for states to have a mean; plain values by name.
        device: where the states are; each worker that uses NCCL needs a GPU of its own.
        timeout_s: seconds after which others that don't answer are given up.
        announce: told whose message cannot be merged.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        worker: int,
        members: Collection[int],
        fingerprint: Mapping[str, Any],
        *,
        device: torch.device,
        timeout_s: float,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.members, self.group = worker, sorted(members), ""
        self.device, self.announce, self._clock = device, announce, clock
        self._timeout = timedelta(seconds=timeout_s)
        self._fingerprint = {**fingerprint, "device": device.type}
        self._own: Header | None = None
        self._state: dict[str, Tensor] = {}
        self._ruined: dict[int, str | None] = {}
        self._episodes: dict[str, Tensor] = {}
        self._said: set[str] = set()
        self._costs = Costs()

    def join(self, resuming: bool, overwrite: bool) -> None:
        """Connect to the other members; nothing of earlier experiments could be in the way.

        Raises:
            ExchangeError: this process wasn't started by `torchrun`, a member doesn't come within the timeout or has
                another fingerprint.
        """
        host, port = _address()
        rank = self.members.index(self.worker)
        with self._bounded():
            store = TCPStore(
                host,
                port,
                is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
                timeout=self._timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                # What the workers of an attempt before a restart have left in the store is of no use.
                store=PrefixStore(f"merging/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store),
                rank=rank,
                world_size=len(self.members),
                timeout=self._timeout + timedelta(seconds=_WATCHDOG_S if self.device.type == "cuda" else 0),
            )
        first, *others = self._gather({"group": uuid4().hex, "fingerprint": self._fingerprint})
        self.group = first["group"]
        for worker, other in zip(self.members[1:], others, strict=True):
            self._require_equal(worker, other["fingerprint"], first["fingerprint"])

    def reached(self, round: int) -> int:
        """Return the last round that any member has done: those who went further back are left out until then."""
        return max(card["round"] for card in self._gather({"round": round}))

    def publish(self, header: Header, state: State) -> None:
        """Keep a copy of a state for those who will read it."""
        self._own = replace(header, group=self.group)
        self._state = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
        }

    def headers(self, round: int) -> list[Header]:
        """Wait for all members and return their headers, by ascending worker.

        Raises:
            ExchangeError: a member doesn't come within the timeout, has ended, is in another round or has another
                model.
        """
        assert self._own is not None, "publish comes first"
        started = self._clock()
        layout = layout_of(self._state)
        cards = self._gather({"header": asdict(self._own), "layout": layout, "ruined": not_finite(self._state)})
        self._costs = self._costs.plus(wait_s=self._clock() - started)
        headers = [Header(**card["header"]) for card in cards]
        for header, card in zip(headers, cards, strict=True):
            if header.round != round:
                raise ExchangeError(f"merging: worker {header.worker} is in round {header.round}, not {round}")
            if differing := difference(card["layout"], layout):
                raise ExchangeError(f"merging: worker {header.worker} has another model: {differing}")
        self._ruined = {header.worker: card["ruined"] for header, card in zip(headers, cards, strict=True)}
        return headers

    def read(self, header: Header) -> dict[str, Tensor]:
        """Return the state of a message, on the devices of this worker's own; all members call this together.

        Raises:
            UnusableMessage: it isn't finite, which all members find alike.
            ExchangeError: a member has ended or doesn't come within the timeout.
        """
        if ruined := self._ruined[header.worker]:
            raise self._skip(header.worker, WEIGHTS, f"is not finite: {ruined}")
        self._said.discard(partner(header.worker, WEIGHTS))
        own = header.worker == self.worker
        state = {name: tensor if own else torch.empty_like(tensor) for name, tensor in self._state.items()}
        with self._bounded():
            self._broadcast(state, self.members.index(header.worker))
        self._costs = self._costs.plus(read_bytes=sum(tensor.nbytes for tensor in state.values()))
        return state

    def share(self, header: Header, episodes: State) -> None:
        """Keep episodes on the CPU for those who will read them."""
        self._episodes = {name: tensor.detach().to("cpu", copy=True) for name, tensor in episodes.items()}

    def shared(self, round: int, after: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return all members, this one included, with the round: what others gave while one was away is gone."""
        return [(worker, round) for worker in self.members]

    def read_shared(self, worker: int, round: int, problem: Problem) -> dict[str, Tensor]:
        """Return the episodes that a member has given in this round, on the CPU; all members call this together.

        Raises:
            UnusableMessage: they cannot be used here.
            ExchangeError: a member has ended or doesn't come within the timeout.
        """
        sent: list[Any] = [self._episodes if worker == self.worker else None]
        with self._bounded():
            dist.broadcast_object_list(sent, self.members.index(worker))
        (episodes,) = sent
        ruined = not_finite(episodes)
        if found := f"is not finite: {ruined}" if ruined else problem(episodes):
            raise self._skip(worker, EPISODES, found)
        self._said.discard(partner(worker, EPISODES))
        self._costs = self._costs.plus(read_bytes=sum(tensor.nbytes for tensor in episodes.values()))
        return episodes

    def report(self, totals: Totals) -> None:
        """Do nothing: nobody can look."""

    def finish(self, totals: Totals) -> None:
        """Do nothing: all members finish in the same round."""

    def take_costs(self) -> Costs:
        """Return the costs since the last call."""
        costs, self._costs = self._costs, Costs()
        return costs

    def close(self) -> None:
        """Disconnect."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        cards: list[Any] = [None] * len(self.members)
        with self._bounded():
            dist.all_gather_object(cards, card)
        return cards

    def _broadcast(self, state: State, source: int) -> None:
        # As bytes, which every backend can send, whatever they mean.
        tensors = [state[name].reshape(-1).view(torch.uint8) for name in sorted(state)]
        works = [dist.broadcast(tensor, source, async_op=True) for tensor in tensors if tensor.numel()]
        for work in works:
            assert work is not None
            work.wait(self._timeout)

    def _require_equal(self, worker: int, theirs: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        if names := differing_names(first, theirs):
            differences = [f"{name}: {shown(first.get(name))} and {shown(theirs.get(name))}" for name in names]
            raise ExchangeError(
                f"merging: workers {self.members[0]} and {worker} have different settings ({'; '.join(differences)})"
            )

    def _skip(self, worker: int, kind: str, reason: str) -> UnusableMessage:
        self._costs = self._costs.plus(skipped=1)
        if partner(worker, kind) not in self._said:
            self._said.add(partner(worker, kind))
            self.announce(f"merging without {partner(worker, kind)}: its message {reason}")
        return UnusableMessage(reason)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            seconds = self._timeout.total_seconds()
            raise ExchangeError(f"merging: a worker has ended or didn't come within {seconds:g} s ({reason})") from None


def _address() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ExchangeError(
            "merging: MASTER_ADDR and MASTER_PORT say where workers meet; start them by torchrun, or use a folder"
        ) from None
