"""What workers leave for each other in a shared folder: messages of tensors, and notes about themselves.

The folder of a group holds::

    group.json                          format, id and settings of the experiment
    group.lock                          held while a worker joins
    worker-<i>.lock                     held by worker i as long as it lives; never deleted
    worker-<i>.json                     Status of worker i
    worker-<i>.round-<r>.safetensors    messages with weights; of each worker the last two
    worker-<i>.episodes-<r>.safetensors messages with episodes; of each worker the last ten
    worker-<i>.<random>.part            what worker i is writing, or was when it was killed

A message is a file in the safetensors format, whose `__metadata__` holds::

    header      a Header and the format, as JSON
    checksum    CRC-32 of the header and all tensors

Every file gets its name when it is complete and on disk, so a reader needs no lock; all but `group.json` have one
writer.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tdmpc.merging.strategies import Layout, State, difference, layout_of

FORMAT = 1
WEIGHTS, EPISODES = KINDS = ("round", "episodes")
"""What a message may hold, as its file is called."""


class UnusableMessage(ValueError):
    """A message that cannot be merged; the text says why, with the message as its subject."""


@dataclass(frozen=True)
class Header:
    """What a message says about itself.

    Attributes:
        worker: number of the sender.
        round: of merging.
        step: of the sender's training environments, at that moment.
        updates: of the sender, until then.
        recent_return: mean return of the sender's recent episodes; None where there is none.
        group: id of the experiment; the exchange fills it in.
    """

    worker: int
    round: int
    step: int
    updates: int
    recent_return: float | None
    group: str = ""


@dataclass(frozen=True)
class Totals:
    """How far a worker is, over all its resumes.

    Attributes:
        steps: of training environments.
        updates: of its weights.
        merges: rounds of merging that changed its weights.
        last_return: mean return of its last evaluation; None where there is none.
        elapsed_s: seconds that its run has taken.
    """

    steps: int = 0
    updates: int = 0
    merges: int = 0
    last_return: float | None = None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Status:
    """What a worker notes about itself.

    Attributes:
        group: id of the experiment.
        host: name of its machine; empty where it could take no lock.
        finished: whether it has done all its steps.
        totals: how far it is.
    """

    group: str
    host: str
    finished: bool = False
    totals: Totals = Totals()


@dataclass(frozen=True)
class Folder:
    """Where things are in the folder of a group."""

    path: Path

    @property
    def group(self) -> Path:
        """The note that says whose folder it is."""
        return self.path / "group.json"

    def lock(self, worker: int) -> Path:
        """Return where a worker's lock is."""
        return self.path / f"worker-{worker}.lock"

    def note(self, worker: int) -> Path:
        """Return where a worker's status is."""
        return self.path / f"worker-{worker}.json"

    def message(self, worker: int, round: int, kind: str = WEIGHTS) -> Path:
        """Return where a worker's message of a round is."""
        return self.path / f"worker-{worker}.{kind}-{round}.safetensors"

    def rounds(self, worker: int, kind: str = WEIGHTS) -> list[int]:
        """Return the rounds of which there are messages of a worker, ascending."""
        names = [path.name.split(".") for path in self.path.glob(f"worker-{worker}.{kind}-*.safetensors")]
        rounds = [name[1].removeprefix(f"{kind}-") for name in names]
        return sorted(int(round) for round in rounds if round.isdigit())

    def workers(self, suffix: str) -> list[int]:
        """Return the numbers of the workers that have a file of that suffix, `.lock` or `.json`, ascending."""
        names = [path.name.split(".")[0].removeprefix("worker-") for path in self.path.glob(f"worker-*{suffix}")]
        return sorted(int(name) for name in names if name.isdigit())

    def parts(self, worker: int) -> list[Path]:
        """Return the files that a worker has begun and not completed."""
        return list(self.path.glob(f"worker-{worker}.*.part"))

    def status(self, worker: int) -> Status | None:
        """Read the status of a worker; None where there is none."""
        try:
            values = read_note(self.note(worker)) or {}
            totals = Totals(**values.pop("totals", {}))
            return Status(**values, totals=totals)
        except TypeError:
            return None

    def group_id(self) -> str | None:
        """Read the id of the experiment; None where there is none."""
        return (read_note(self.group) or {}).get("id")


def read_statuses(path: Path) -> dict[int, Status]:
    """Return the status of every worker that has joined the group of a folder, by number; sum them for group totals.

    It needs no lock, and a folder that doesn't exist has no workers.
    """
    folder = Folder(path)
    group = folder.group_id()
    statuses = {worker: folder.status(worker) for worker in folder.workers(".json")}
    return {worker: status for worker, status in statuses.items() if status and status.group == group}


def write_message(path: Path, header: Header, state: State) -> None:
    """Write a message, whole or not at all, in place of the one of that name.

    Args:
        path: of the file; its folder exists.
        header: of the message.
        state: tensors of any kind, on any device; none is kept.

    Raises:
        OSError: it cannot be written.
    """
    # Copies, since names may share memory in a model, and may not in a file.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    text = json.dumps(asdict(header) | {"format": FORMAT})
    # Not `save_file`, which makes a temporary file of its own that nobody would clean up after a kill.
    content = save(tensors, {"header": text, "checksum": _checksum(text, tensors)})
    with _replacing(path, header.worker) as part:
        part.write_bytes(content)


def read_header(path: Path) -> Header:
    """Read what a message says about itself, and none of its tensors.

    Raises:
        UnusableMessage: it isn't there, isn't whole, or is of another format.
    """
    with _opened(path) as file:
        return _parse(file.metadata())


def read_message(path: Path, layout: Layout | None = None) -> tuple[Header, dict[str, Tensor]]:
    """Read a message.

    Args:
        path: of the file; it may be read-only.
        layout: which tensors it has to consist of; None: any.

    Returns:
        Its header and its tensors, on the CPU.

    Raises:
        UnusableMessage: it isn't there, isn't what was written, is of another format or layout, or holds a number
            that isn't finite.
    """
    with _opened(path) as file:
        metadata = file.metadata()
        header = _parse(metadata)
        state = file.get_tensors()
    if metadata.get("checksum") != _checksum(metadata["header"], state):
        raise UnusableMessage("is damaged: its checksum is wrong")
    if layout is not None and (differing := difference(layout_of(state), layout)):
        raise UnusableMessage(f"is of another model: {differing}")
    if ruined := not_finite(state):
        raise UnusableMessage(f"is not finite: {ruined}")
    return header, state


def not_finite(state: State) -> str | None:
    """Return the name of a tensor that holds a number which isn't finite, None where there is none."""
    return next((name for name, tensor in state.items() if not bool(tensor.isfinite().all())), None)


def write_note(path: Path, worker: int, content: Mapping[str, Any]) -> None:
    """Write a note, whole or not at all, in place of the one of that name.

    Raises:
        OSError: it cannot be written.
    """
    with _replacing(path, worker) as part:
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_first_note(path: Path, worker: int, content: Mapping[str, Any]) -> None:
    """Write a note unless there is one of that name; of several workers that do so at once, one succeeds.

    Raises:
        OSError: it cannot be written.
    """
    with _part(path.parent, worker) as part:
        part.write_text(json.dumps(content, indent=1), encoding="utf-8")
        _sync(part)
        try:
            os.link(part, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links; there it takes a lock
            part.replace(path)
        _sync(path.parent)


def read_note(path: Path) -> dict[str, Any] | None:
    """Read a note; None where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def _replacing(path: Path, worker: int) -> Iterator[Path]:
    with _part(path.parent, worker) as part:
        yield part
        _sync(part)
        part.replace(path)
        _sync(path.parent)


@contextmanager
def _part(folder: Path, worker: int) -> Iterator[Path]:
    part = folder / f"worker-{worker}.{uuid4().hex}.part"
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        # Not mapped into memory: reading what its writer or a server takes away would kill this process.
        with safe_open(path, "pt", backend="pread") as file:
            yield file
    except FileNotFoundError:
        raise UnusableMessage("is gone") from None
    except (SafetensorError, OSError) as error:
        raise UnusableMessage(f"cannot be read: {error}") from None


def _parse(metadata: dict[str, str] | None) -> Header:
    try:
        values = json.loads((metadata or {})["header"])
        if values.pop("format") != FORMAT:
            raise UnusableMessage(f"is not of format {FORMAT}")
        header = Header(**values)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise UnusableMessage("has no header") from None
    if not all(type(number) is int for number in (header.worker, header.round, header.step, header.updates)):
        raise UnusableMessage("has no header")
    return header


def _checksum(header: str, tensors: State) -> str:
    total = zlib.crc32(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
