"""The replay on disk: its rows in immutable segments that the checkpoints of a run share.

A run keeps them beside its checkpoints::

    <run directory>/
        checkpoints/<step>/           each holds, as JSON, the index that `ReplaySegments.save` returned
        replay/segment-<number>.pt    rows, written once; an index lists those that it needs
"""

import hashlib
import io
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tdmpc.replay import ReplayBuffer

MAX_LOOSE = 16  # small segments that may gather before a save merges some of them


class ReplaySegmentError(RuntimeError):
    """A segment that cannot be restored; the message is one line that names its file."""


class Saved(NamedTuple):
    """A save: the `index` to restore it by, ready for JSON, and the `bytes_written`, index not counted."""

    index: dict[str, Any]
    bytes_written: int


@dataclass(frozen=True)
class Spans:
    """Rows at the positions from `first` up to, not including, `until`: both [E], one span an environment."""

    first: NDArray[np.int64]
    until: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of all environments together."""
        return int((self.until - self.first).sum())

    def overlap(self, other: "Spans") -> bool:
        """Return whether any row lies in both."""
        return bool((np.maximum(self.first, other.first) < np.minimum(self.until, other.until)).any())

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the environments and the positions of all N rows, [N] each, environment by environment."""
        lengths = self.until - self.first
        envs = np.repeat(np.arange(len(lengths)), lengths)
        before = np.cumsum(lengths) - lengths
        return envs, np.arange(len(envs)) + (self.first - before)[envs]

    def split(self, parts: int) -> "list[Spans]":
        """Cut into parts of equal size, up to a row an environment: the oldest rows first, so they die in order."""
        edges = [self.first + (self.until - self.first) * part // parts for part in range(parts + 1)]
        return [Spans(*pair) for pair in itertools.pairwise(edges)]


@dataclass(frozen=True)
class Segment:
    """A file of rows, as an index describes it."""

    file: str
    bytes: int
    sha256: str
    spans: Spans

    def entry(self) -> dict[str, Any]:
        """Return the description, ready for JSON."""
        first, until = self.spans.first.tolist(), self.spans.until.tolist()
        return {"file": self.file, "bytes": self.bytes, "sha256": self.sha256, "first": first, "until": until}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "Segment":
        """Return the segment that `entry` described."""
        first, until = (np.array(entry[key], dtype=np.int64) for key in ("first", "until"))
        return cls(entry["file"], entry["bytes"], entry["sha256"], Spans(first, until))


class ReplaySegments:
    """Save a replay by its new rows alone, and restore it exactly.

    A segment holds, for every environment, the rows from some position up to the newest at that time. An index
    lists segments in the order of writing, and where two hold the same position the later one counts: so rows
    that were saved, discarded and written anew need no care but to be saved again. Restoring takes of each
    segment what the index says is held.

    Nothing but a complete segment ever has a segment's name, and no segment replaces another. What a killed save
    leaves behind is in no index, and goes at the next `save` (temporary files) or `prune` (segments).

    Many small saves make many small segments, so some saves write the newest of them again, as one. With
    quarter-full as the limit between small and large, an index lists at most `MAX_LOOSE` plus a logarithm of
    small ones, and a row is rewritten a logarithmic number of times before it is in a large one, where it stays.

    Args:
        folder: of the segments, made when needed; those of one run.
        replay: the buffer, which nobody else saves.
        segment_bytes: rows that a segment holds at most, about. A save takes memory for one segment, twice.
    """

    def __init__(self, folder: Path, replay: ReplayBuffer, segment_bytes: int = 8 * 2**20) -> None:
        self._folder, self._replay = folder, replay
        self._max_rows = max(1, segment_bytes // replay.row_bytes)
        self._segments: list[Segment] = []  # what the next index builds upon

    def save(self) -> Saved:
        """Write the rows that are new since the last save or restore.

        After an error nothing of this save remains on disk, and the next one makes up for it.

        Raises:
            OSError: the disk is full or failed.
        """
        held = Spans(*self._replay.held())
        listed = [segment for segment in self._segments if segment.spans.overlap(held)]
        kept = listed[: self._num_kept(listed, held)]
        written = self._write_all(self._missing(held, kept, listed[len(kept) :]))
        self._segments = kept + written
        self._replay.unsaved_from = held.until
        index = {"segments": [segment.entry() for segment in self._segments], "state": self._replay.state_dict()}
        return Saved(index, sum(segment.bytes for segment in written))

    def restore(self, index: Mapping[str, Any]) -> None:
        """Bring the buffer to where it was when `index` was saved, and go on saving from there.

        A buffer of another capacity takes the newest rows that fit.

        Raises:
            ReplaySegmentError: a file is missing, truncated or damaged; the buffer is as before.
            ValueError: the buffer has another number of environments; it is as before.
        """
        segments = [Segment.from_entry(entry) for entry in index["segments"]]
        for segment in segments:
            self._verify(segment)
        self._replay.load_state_dict(index["state"])
        held = Spans(*self._replay.held())
        for segment in segments:
            self._load(segment, held)
        self._segments = segments
        self._replay.unsaved_from = held.until

    def prune(self, keep: Iterable[Mapping[str, Any]]) -> None:
        """Delete the segments that no index needs, once the checkpoint with the newest index is complete.

        What the last `save` returned stays, kept or not: the next index builds upon it.

        Args:
            keep: the indices of all checkpoints that are kept.
        """
        needed = {entry["file"] for index in keep for entry in index["segments"]}
        needed |= {segment.file for segment in self._segments}
        for path in self._on_disk().values():
            if path.name not in needed:
                path.unlink()

    def _num_kept(self, listed: list[Segment], held: Spans) -> int:
        """Return how many segments, from the oldest, the save leaves alone; it writes the others' rows again."""
        kept, rows = len(listed), int((held.until - np.maximum(held.first, self._replay.unsaved_from)).sum())
        sizes = [segment.spans.num_rows for segment in listed]
        loose = self._max_rows // 4
        if rows >= loose or sum(size < loose for size in sizes) >= MAX_LOOSE:
            # Each one left is at least twice the next, and each row rewritten is in one half larger again.
            while kept and sizes[kept - 1] < min(2 * rows, loose):
                kept -= 1
                rows += sizes[kept]
        # Discarded rows, or environments of unequal pace, can keep segments alive that are mostly dead.
        return kept if sum(sizes[:kept]) + rows <= 2 * held.num_rows else 0

    def _missing(self, held: Spans, kept: list[Segment], dropped: list[Segment]) -> Spans:
        """Return the rows held that the kept segments lack, and those that the dropped ones had."""
        if not kept:  # as also in a new folder, where rows may count as saved that are in another
            return held
        first = np.minimum.reduce([self._replay.unsaved_from, *(segment.spans.first for segment in dropped)])
        return Spans(np.maximum(first, held.first), held.until)

    def _write_all(self, spans: Spans) -> list[Segment]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        parts = spans.split(-(-spans.num_rows // self._max_rows)) if spans.num_rows else []
        written = []
        try:
            for number, part in enumerate(parts, self._next_number()):
                written.append(self._write(number, part))
            for directory in (self._folder, self._folder.parent):
                _sync_directory(directory)
        except BaseException:  # of a full disk, give back what was taken
            for segment in written:
                (self._folder / segment.file).unlink()
            self._remove_leftovers()
            raise
        return written

    def _write(self, number: int, spans: Spans) -> Segment:
        # By way of memory, as torch's writer hides the errors of a full disk behind its own.
        content = io.BytesIO()
        torch.save(self._replay.read(*spans.rows()), content)
        data = content.getbuffer()
        path = self._folder / f"segment-{number:06d}.pt"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return Segment(path.name, len(data), hashlib.sha256(data).hexdigest(), spans)

    def _next_number(self) -> int:
        # Of all on disk, not of those listed: others may belong to kept checkpoints.
        return max(self._on_disk(), default=0) + 1

    def _on_disk(self) -> dict[int, Path]:
        """Return all segments by number; a file of another's, such as `segment-000001 (copy).pt`, is none."""
        numbered = ((path.stem.removeprefix("segment-"), path) for path in self._folder.glob("segment-*.pt"))
        return {int(number): path for number, path in numbered if number.isdigit()}

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob("segment-*.part"):
            path.unlink()

    def _verify(self, segment: Segment) -> None:
        path = self._folder / segment.file
        try:
            with path.open("rb") as file:
                size, digest = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise ReplaySegmentError(f"{path} {problem}") from None
        if size != segment.bytes:
            raise ReplaySegmentError(f"{path} has {size} bytes instead of {segment.bytes}")
        if digest != segment.sha256:
            raise ReplaySegmentError(f"{path} is damaged: its checksum is not the saved one")

    def _load(self, segment: Segment, held: Spans) -> None:
        columns = torch.load(self._folder / segment.file, map_location="cpu", weights_only=True)
        envs, positions = segment.spans.rows()
        # Where the capacity has changed, a row that is held no longer may fall on one that is.
        alive = np.flatnonzero((held.first[envs] <= positions) & (positions < held.until[envs]))
        chosen = torch.from_numpy(alive)
        columns = {name: column.index_select(0, chosen) for name, column in columns.items()}
        self._replay.write(envs[alive], positions[alive], columns)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
