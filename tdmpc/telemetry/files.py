"""Rows in files that a kill, a full disk or a restart leaves whole: `metrics.jsonl` and `eval.csv`."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tdmpc.telemetry.recorder import Row


class RowSink:
    """The part of a sink that one which only wants rows leaves empty."""

    def announce(self, text: str) -> None:
        """Ignore text."""

    def add_video(self, step: int, path: Path) -> None:
        """Ignore videos."""

    def advance(self, step: int, eta_s: float | None) -> None:
        """Ignore steps."""

    def close(self) -> None:
        """Release nothing."""


class JsonLines(RowSink):
    """Append every row to a file, one JSON object a line; a number that is not finite becomes null.

    Every row is in the file once and whole, except that a kill can cut the last one, which the next start removes.
    A row that could not be written goes before the next one.

    Args:
        path: the file, made where it does not exist.
        resume_step: step of the checkpoint that the run goes on from, written after the rows of its step. Rows of
            later steps are removed, for the run will write them again. None keeps all.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._lines = _Lines(path, lambda line: json.loads(line)["step"], resume_step)

    def write(self, row: Row) -> None:
        """Append a row and hand it to the operating system at once.

        Raises:
            OSError: it was not written; the next write or close tries again.
        """
        self._lines.append(json.dumps({name: _strict(value) for name, value in row.items()}, allow_nan=False))

    def close(self) -> None:
        """Write what could not be written before, and close the file.

        Raises:
            OSError: it still cannot be written.
        """
        self._lines.close()


class EvalCsv(RowSink):
    """Append evaluations as `step,episode_reward`, the form of the published results.

    The file is kept whole like that of `JsonLines`. An evaluation whose episodes all failed has no return and no line.

    Args:
        path: the file, made with its header.
        resume_step: as in `JsonLines`.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._lines = _Lines(path, lambda line: int(line.split(b",")[0]), resume_step)
        if self._lines.empty:
            self._lines.append("step,episode_reward")

    def write(self, row: Row) -> None:
        """Append the row of an evaluation; ignore others.

        Raises:
            OSError: it was not written; the next write or close tries again.
        """
        if row["kind"] == "eval" and "eval/episode_reward" in row:
            self._lines.append(f"{row['step']},{row['eval/episode_reward']}")

    def close(self) -> None:
        """Write what could not be written before, and close the file.

        Raises:
            OSError: it still cannot be written.
        """
        self._lines.close()


class _Lines:
    """A file of whole lines, each written once."""

    def __init__(self, path: Path, step_of: Callable[[bytes], Any], resume_step: int | None) -> None:
        _repair(path, step_of, math.inf if resume_step is None else resume_step)
        # Unbuffered: a line is one call to the operating system, and in the file when that returns.
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._torn_at: int | None = None

    @property
    def empty(self) -> bool:
        return self._file.tell() == 0

    def append(self, line: str) -> None:
        self._pending += line.encode() + b"\n"
        self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        self._cut()
        self._torn_at = self._file.seek(0, os.SEEK_END)
        try:
            unwritten = self._pending
            while unwritten:  # a disk that fills up takes a part, and only the next call says why
                unwritten = unwritten[self._file.write(unwritten) :]
            self._pending, self._torn_at = b"", None
        finally:  # an interrupt too can come in the middle
            self._cut()

    def _cut(self) -> None:
        if self._torn_at is not None:
            self._file.truncate(self._torn_at)
            self._torn_at = None


def _strict(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _repair(path: Path, step_of: Callable[[bytes], Any], last_step: float) -> None:
    """Remove a torn last line and the rows after `last_step`; nothing else changes."""
    lines = _read(path)
    kept = [line for line in lines if line.endswith(b"\n") and not _is_later(line, step_of, last_step)]
    if kept != lines:
        _replace(path, b"".join(kept))


def _read(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return file.readlines()


def _is_later(line: bytes, step_of: Callable[[bytes], Any], last_step: float) -> bool:
    try:
        return step_of(line) > last_step
    except (ValueError, KeyError, TypeError):
        return False  # a header, or a line that someone else wrote and may want


def _replace(path: Path, content: bytes) -> None:
    """Give the file another content at one moment: whoever is killed leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
