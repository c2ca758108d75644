"""How the workers of a group meet: `Exchange`, and `Filesystem`, which does it through a folder (see messages.py).

Locks tell who lives, and spare those who start at the same time a race. Nothing depends on them: on a file system
where they do nothing, a worker that ends early is waited for until the timeout, and that is all.
"""

import json
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from filelock import FileLock, Timeout
from torch import Tensor

from tdmpc.keys import shown
from tdmpc.merging.messages import (
    EPISODES,
    FORMAT,
    KINDS,
    WEIGHTS,
    Folder,
    Header,
    Status,
    Totals,
    UnusableMessage,
    read_header,
    read_message,
    read_note,
    read_statuses,
    write_first_note,
    write_message,
    write_note,
)
from tdmpc.merging.strategies import Layout, State, layout_of

KEPT_ROUNDS = {WEIGHTS: 2, EPISODES: 10}
"""Messages that a worker leaves of each kind: of weights only the newest count, of episodes all that were not read."""
POLL_S = 0.05
LOCK_POLL_S = 0.005
GROUP_LOCK_S = 10.0  # others join in milliseconds
OWN_LOCK_S = 2.0  # others hold it for a moment when they look whether this worker lives


class ExchangeError(ValueError):
    """Workers that cannot meet; the message is one line for whoever started them."""


@dataclass(frozen=True)
class Costs:
    """What meeting the others has cost.

    Attributes:
        read_bytes: size of the states and episodes that were read.
        wait_s: seconds spent waiting for others.
        skipped: messages that were missing or could not be used.
    """

    read_bytes: int = 0
    wait_s: float = 0.0
    skipped: int = 0

    def plus(self, *, read_bytes: int = 0, wait_s: float = 0.0, skipped: int = 0) -> "Costs":
        """Return the costs after these have been added."""
        return Costs(self.read_bytes + read_bytes, self.wait_s + wait_s, self.skipped + skipped)


Problem = Callable[[State], str | None]
"""Returns why episodes cannot be used, with their message as the subject; None where they can."""


class Exchange(Protocol):
    """How a worker meets the others. A round is `publish`, `headers`, and `read` for each of those in their order.

    Where experience is shared, `share` comes before `publish`, so that who sees a worker in a round finds its episodes
    too, and `shared`, with `read_shared` for each of those in their order, at the end.
    """

    def join(self, resuming: bool, overwrite: bool) -> None:
        """Become part of the group.

        Args:
            resuming: this worker continues from a checkpoint.
            overwrite: replace what an earlier experiment has left.

        Raises:
            ExchangeError: that isn't possible.
        """
        ...

    def reached(self, round: int) -> int:
        """Return the last round that is over for this worker, given the last one that it has done itself."""
        ...

    def publish(self, header: Header, state: State) -> None:
        """Show the others a state, of which no tensor is kept.

        Raises:
            ExchangeError: that isn't possible.
        """
        ...

    def headers(self, round: int) -> list[Header]:
        """Return the messages to merge in a round, by ascending worker; this worker's own is one of them.

        It may wait for others, within a bound. Who is missing is counted, and announced once.
        """
        ...

    def read(self, header: Header) -> dict[str, Tensor]:
        """Return the state of a message.

        Raises:
            UnusableMessage: it cannot be merged, which is counted, and announced once.
        """
        ...

    def share(self, header: Header, episodes: State) -> None:
        """Give the others episodes, of which no tensor is kept; those of a round replace what was given in it before.

        Raises:
            ExchangeError: that isn't possible.
        """
        ...

    def shared(self, round: int, after: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return of which workers and rounds there are episodes to read, ascending; it waits for nobody.

        Args:
            round: that this worker is in.
            after: the last round of every other worker whose episodes have been read.
        """
        ...

    def read_shared(self, worker: int, round: int, problem: Problem) -> dict[str, Tensor]:
        """Return the episodes that a worker has given in a round, on the CPU.

        Raises:
            UnusableMessage: they cannot be used, which is counted, and announced once.
        """
        ...

    def report(self, totals: Totals) -> None:
        """Tell whoever looks how far this worker is."""
        ...

    def finish(self, totals: Totals) -> None:
        """Tell the others that this worker has done all its steps, so that nobody waits for it."""
        ...

    def take_costs(self) -> Costs:
        """Return the costs since the last call."""
        ...

    def close(self) -> None:
        """Leave, finished or not; harmless before `join` and when repeated."""
        ...


@dataclass(frozen=True)
class _Absence:
    """Why there is no message of a worker in a round, and whether to wait for one."""

    reason: str
    awaited: bool = False


class Filesystem:
    """Meet through a folder.

    Args:
        folder: for this group alone; it is made where it doesn't exist.
        worker: number of this worker.
        members: numbers of all workers that merge, this one included.
        fingerprint: what has to be equal for states to have a mean; plain values by name.
        every: steps between rounds; it is part of the fingerprint, as a round must mean the same to all.
        sync: wait in every round for this very round of every member; otherwise take what there is.
        timeout_s: seconds to wait in a round, for all members together.
        max_age: steps that a message may be behind this worker's own, where nobody waits.
        announce: told who is missing and why, when that changes.
        clock: seconds, monotonic.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        folder: Path,
        worker: int,
        members: Collection[int],
        fingerprint: Mapping[str, Any],
        *,
        every: int,
        sync: bool,
        timeout_s: float,
        max_age: int,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.worker, self.group = Folder(folder), worker, ""
        self.sync, self.timeout_s, self.max_age = sync, timeout_s, max_age
        self.announce, self._clock, self._sleep = announce, clock, sleep
        self._settings = json.loads(json.dumps({"format": FORMAT, **fingerprint, "every": every}))
        self._others = sorted(set(members) - {worker})
        self._lock = _file_lock(self.folder.lock(worker))
        self._locks_tell = False  # whether a lock that is free means that its worker doesn't live
        self._own: Header | None = None
        self._layout: Layout = {}
        self._absent: dict[int, Status | None] = {}  # who wasn't running when this worker joined, with what they noted
        self._late: set[int] = set()  # waited for in vain once, and not again before they have caught up
        self._foreign: set[int] = set()
        self._said: dict[str, str] = {}
        self._costs = Costs()

    def join(self, resuming: bool, overwrite: bool) -> None:
        """Become part of the group of the folder, which is founded where there is none.

        A worker that starts anew and finds messages of its own is taken for restarted while others are running;
        when nobody is, they are what an earlier experiment has left. To be running is to have joined, so of workers
        that start together, the first one to join decides.

        Raises:
            ExchangeError: the folder is of other settings or an earlier experiment (and `overwrite` is false, or
                someone is running in it), another process is this worker, or it cannot be written to.
        """
        try:
            with self._writing():
                self.folder.path.mkdir(parents=True, exist_ok=True)
                self._claim()
                if not resuming:
                    self.folder.note(self.worker).unlink(missing_ok=True)
                with locked(self.folder.path / "group.lock", self.announce):
                    self.group = self._enter(resuming, overwrite)
                    self._tidy(resuming)
                    running = self._running()
                    self._absent = {n: self._status_of(n) for n in self._others if n not in running}
                    status = self._status_of(self.worker) if resuming else None
                    self._note(finished=False, totals=status.totals if status else Totals())
        except ExchangeError:
            self.close()
            raise

    def reached(self, round: int) -> int:
        """Return the round it is given: a worker that fell behind goes through its rounds with whom it still finds."""
        return round

    def publish(self, header: Header, state: State) -> None:
        """Write a message, then delete this worker's older ones.

        Raises:
            ExchangeError: it cannot be written.
        """
        header = replace(header, group=self.group)
        with self._writing():
            self._write(header, state, WEIGHTS)
            self._own, self._layout = header, layout_of(state)

    def headers(self, round: int) -> list[Header]:
        """Return the messages to merge in a round; see `Exchange.headers`.

        Nobody waits for a member that has finished, that has died since this worker joined (one that was not there
        then may be about to come back), that is past this round, or that was waited for in vain before and hasn't
        come to the round before this one since. As all decide that for themselves, workers that merge after one has
        timed out may differ in whether they have its message.
        """
        started, present = self._clock(), {}
        while True:
            found = {worker: self._find(worker, round) for worker in self._others if worker not in present}
            present |= {worker: header for worker, header in found.items() if isinstance(header, Header)}
            absent = {worker: absence for worker, absence in found.items() if isinstance(absence, _Absence)}
            awaited = {worker for worker, absence in absent.items() if absence.awaited}
            remaining_s = started + self.timeout_s - self._clock()
            if not awaited or remaining_s <= 0:
                break
            self._sleep(min(POLL_S, remaining_s))
        self._late |= awaited
        for worker, absence in absent.items():
            self._miss(worker, absence.reason)
        self._costs = self._costs.plus(wait_s=self._clock() - started)
        if self._own:
            present[self.worker] = self._own
        return [present[worker] for worker in sorted(present)]

    def read(self, header: Header) -> dict[str, Tensor]:
        """Return the state of a message, on the CPU.

        Raises:
            UnusableMessage: it isn't what was written, is of another model, isn't finite, or is gone by now.
        """
        return self._read(header.worker, header.round, WEIGHTS, layout=self._layout)

    def share(self, header: Header, episodes: State) -> None:
        """Write a message with episodes, then delete this worker's oldest ones.

        Raises:
            ExchangeError: it cannot be written.
        """
        with self._writing():
            self._write(replace(header, group=self.group), episodes, EPISODES)

    def shared(self, round: int, after: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return of which workers and rounds there are episodes that were not read; see `Exchange.shared`.

        They are of all members, also of those that are late or have ended: experience does not age as weights do.
        Who waits for all in every round reads none of a later one, so that it does not matter who is faster.
        """
        there = [(worker, number) for worker in self._others for number in self.folder.rounds(worker, EPISODES)]
        return [
            (worker, number)
            for worker, number in there
            if number > after.get(worker, -1) and (number <= round or not self.sync)
        ]

    def read_shared(self, worker: int, round: int, problem: Problem) -> dict[str, Tensor]:
        """Return the episodes that a worker has given in a round, on the CPU; see `Exchange.read_shared`."""
        return self._read(worker, round, EPISODES, problem=problem)

    def report(self, totals: Totals) -> None:
        """Write down how far this worker is.

        Raises:
            ExchangeError: it cannot be written.
        """
        with self._writing():
            self._note(finished=False, totals=totals)

    def finish(self, totals: Totals) -> None:
        """Write down that this worker has done all its steps; its last messages stay.

        Raises:
            ExchangeError: it cannot be written.
        """
        with self._writing():
            self._note(finished=True, totals=totals)

    def take_costs(self) -> Costs:
        """Return the costs since the last call."""
        costs, self._costs = self._costs, Costs()
        return costs

    def close(self) -> None:
        """Give up the lock that says that this worker lives."""
        self._lock.release()

    def _claim(self) -> None:
        """Take the lock of this worker, and see whether locks work here."""
        try:
            self._lock.acquire(timeout=OWN_LOCK_S)
            self._locks_tell = held(self.folder.lock(self.worker)) is True
        except Timeout:
            raise ExchangeError(
                f"{self.folder.path}: worker {self.worker} is running in it; choose another number or exp_name"
            ) from None
        except OSError:
            self._locks_tell = False
        if not self._locks_tell:
            self.announce(f"warning: no locks in {self.folder.path}; who ends early is waited for until the timeout")

    def _enter(self, resuming: bool, overwrite: bool) -> str:
        """Return the id of the group to be part of, after founding or replacing it where that is due."""
        if not self.folder.group.exists():
            write_first_note(self.folder.group, self.worker, self._new_group())
        group, running = read_note(self.folder.group) or {}, self._running()
        # Where locks don't tell who runs, this could replace the group of one that has joined a moment ago.
        replacing = overwrite and self._locks_tell
        left_over = not resuming and not running and (replacing or self._has_messages(group.get("id", "")))
        problem = _changes(group, self._settings)
        if left_over and not problem:
            problem = f"holds messages of worker {self.worker} of an earlier experiment"
        if not problem:
            return group["id"]
        if not overwrite:
            raise ExchangeError(f"{self.folder.path}: {problem}; overwrite=true to replace it, or another exp_name")
        if running:
            numbers = ", ".join(str(worker) for worker in running)
            raise ExchangeError(f"{self.folder.path}: {problem}; still running in it: worker {numbers}")
        return self._replace_group()

    def _new_group(self) -> dict[str, Any]:
        return {"id": uuid4().hex, "settings": self._settings}

    def _replace_group(self) -> str:
        group = self._new_group()
        write_note(self.folder.group, self.worker, group)
        for pattern in ("worker-*.safetensors", "worker-*.json"):
            for path in self.folder.path.glob(pattern):
                path.unlink(missing_ok=True)
        return group["id"]

    def _running(self) -> list[int]:
        """Return the numbers of the other workers that live in the folder and have joined, members or not."""
        others = [worker for worker in self.folder.workers(".json") if worker != self.worker]
        return [worker for worker in others if self._locks_tell and held(self.folder.lock(worker))]

    def _has_messages(self, group: str) -> bool:
        messages = self._messages_of(self.worker, group).values()
        return any(isinstance(message, Header) for message in messages)

    def _tidy(self, resuming: bool) -> None:
        """Delete what this worker left half written, and messages that don't belong to the life it begins."""
        for part in self.folder.parts(self.worker):
            part.unlink(missing_ok=True)
        for kind in KINDS:
            messages = self._messages_of(self.worker, self.group, kind)
            continued = {round for round, message in messages.items() if resuming and isinstance(message, Header)}
            self._delete(set(self.folder.rounds(self.worker, kind)) - continued, kind)

    def _write(self, header: Header, state: State, kind: str) -> None:
        write_message(self.folder.message(self.worker, header.round, kind), header, state)
        rounds = self.folder.rounds(self.worker, kind)
        # A worker that went back to its checkpoint has messages of rounds that it is going to do again.
        kept = [round for round in rounds if round <= header.round][-KEPT_ROUNDS[kind] :]
        self._delete(set(rounds) - set(kept), kind)

    def _read(
        self, worker: int, round: int, kind: str, layout: Layout | None = None, problem: Problem = lambda state: None
    ) -> dict[str, Tensor]:
        try:
            header, state = read_message(self.folder.message(worker, round, kind), layout)
            if header.group != self.group:
                raise UnusableMessage("is of another experiment")
            if (header.worker, header.round) != (worker, round):
                raise UnusableMessage("isn't what its name says")
            if found := problem(state):
                raise UnusableMessage(found)
        except UnusableMessage as error:
            self._miss(worker, f"its message {error}", kind)
            raise
        self._costs = self._costs.plus(read_bytes=sum(tensor.nbytes for tensor in state.values()))
        if self._said.pop(partner(worker, kind), None):
            self.announce(f"merging with {partner(worker, kind)} again")
        return state

    def _delete(self, rounds: set[int], kind: str) -> None:
        for round in rounds:
            self.folder.message(self.worker, round, kind).unlink(missing_ok=True)

    def _find(self, worker: int, round: int) -> Header | _Absence:
        # In this order: who ends between the two lines has written its last message before.
        gone = self._gone(worker)
        messages = self._messages_of(worker, self.group)
        return self._of_round(worker, round, messages, gone) if self.sync else self._newest(messages, gone)

    def _of_round(
        self, worker: int, round: int, messages: Mapping[int, Header | str], gone: str | None
    ) -> Header | _Absence:
        newest = max(messages, default=-1)
        # Were it this round that it had to show, one that fell behind once by more than the timeout would never be
        # waited for again, though it may be as fast as the others.
        if newest >= round - 1:
            self._late.discard(worker)
        message = messages.get(round, "")
        if isinstance(message, Header):
            return message
        past = "it is past this round" if newest > round else ""
        if reason := message or gone or past:
            return _Absence(reason)
        return _Absence(f"it didn't come within {self.timeout_s:g} s", awaited=worker not in self._late)

    def _newest(self, messages: Mapping[int, Header | str], gone: str | None) -> Header | _Absence:
        step = self._own.step if self._own else 0
        usable = [message for message in messages.values() if isinstance(message, Header)]
        if usable and step - usable[-1].step <= self.max_age:
            return usable[-1]
        unusable = [message for message in messages.values() if isinstance(message, str)]
        behind = f"it is more than {self.max_age} steps behind" if usable else "it has published nothing yet"
        return _Absence(gone or (unusable[-1] if unusable else behind))

    def _gone(self, worker: int) -> str | None:
        """Return why nothing is to be expected of a worker, None where something is."""
        status = self._status_of(worker)
        if status is None:
            return None
        if status.finished:
            return "it has finished"
        if status == self._absent.get(worker):
            return None
        # Some network file systems keep their locks to themselves on each machine.
        local = self._locks_tell and status.host == platform.node()
        return "it has stopped" if local and held(self.folder.lock(worker)) is False else None

    def _messages_of(self, worker: int, group: str, kind: str = WEIGHTS) -> dict[int, Header | str]:
        """Return the headers of a worker's messages by round, ascending, or why they cannot be used."""
        messages: dict[int, Header | str] = {}
        for round in self.folder.rounds(worker, kind):
            try:
                header = read_header(self.folder.message(worker, round, kind))
            except UnusableMessage as error:
                messages[round] = f"its message {error}"
                continue
            if header.group != group:
                self._say_foreign(worker)
            elif (header.worker, header.round) != (worker, round):
                messages[round] = "its message isn't what its name says"
            else:
                messages[round] = header
        return messages

    def _say_foreign(self, worker: int) -> None:
        if worker not in self._foreign:
            self._foreign.add(worker)
            self.announce(f"ignoring messages of worker {worker} in {self.folder.path}, of another experiment")

    def _miss(self, worker: int, reason: str, kind: str = WEIGHTS) -> None:
        self._costs = self._costs.plus(skipped=1)
        if self._said.get(partner(worker, kind)) != reason:
            self._said[partner(worker, kind)] = reason
            self.announce(f"merging without {partner(worker, kind)}: {reason}")

    def _status_of(self, worker: int) -> Status | None:
        status = self.folder.status(worker)
        return status if status and status.group == self.group else None

    def _note(self, finished: bool, totals: Totals) -> None:
        host = platform.node() if self._locks_tell else ""
        status = Status(self.group, host, finished, totals)
        write_note(self.folder.note(self.worker), self.worker, asdict(status))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExchangeError(f"{self.folder.path}: cannot be written to ({reason})") from None


@contextmanager
def locked(path: Path, announce: Callable[[str], None], timeout_s: float = GROUP_LOCK_S) -> Iterator[None]:
    """Hold a lock; where it cannot be had in time, or at all, do without and announce it."""
    lock = _file_lock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except OSError as error:  # a timeout is one too
        reason = f"held for {timeout_s:g} s" if isinstance(error, Timeout) else error.strerror
        announce(f"warning: going on without the lock {path} ({reason})")
    try:
        yield
    finally:
        lock.release()


def held(path: Path) -> bool | None:
    """Tell whether somebody holds a lock; None where that cannot be told."""
    if not path.exists():
        return False
    lock = _file_lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return None
    lock.release()
    return False


def still_running(path: Path) -> list[int]:
    """Return the workers that have joined the group of a folder and neither finished nor, as far as one sees, ended."""
    folder, statuses = Folder(path), read_statuses(path)
    ended = {worker for worker, status in statuses.items() if status.host == platform.node()}
    ended = {worker for worker in ended if held(folder.lock(worker)) is False}
    return [worker for worker, status in sorted(statuses.items()) if not status.finished and worker not in ended]


def partner(worker: int, kind: str) -> str:
    """Return what a worker is merged with, in words."""
    return f"worker {worker}" if kind == WEIGHTS else f"the episodes of worker {worker}"


def differing_names(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what two fingerprints differ in."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _file_lock(path: Path) -> FileLock:
    # A soft lock would outlive a killed holder. A thread may close what another has joined.
    return FileLock(path, thread_local=False, fallback_to_soft=False, poll_interval=LOCK_POLL_S)


def _changes(group: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in which settings a group differs; nothing where it doesn't."""
    before = group.get("settings")
    if "id" not in group or not isinstance(before, dict):
        return "holds a group.json that cannot be read"
    names = differing_names(before, now)
    changes = [f"{name}: {shown(before.get(name))} before, {shown(now.get(name))} now" for name in names]
    return f"holds an experiment with other settings ({'; '.join(changes)})" if changes else ""
