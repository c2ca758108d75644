"""Rows in files that a kill, a full disk or a restart leaves whole: `metrics.jsonl` and `eval.csv`."""

import json
import math
import os
from pathlib import Path

from tdmpc.telemetry.recorder import Row


class RowSink:
    """The part of a sink that one which only wants rows leaves empty."""

    def announce(self, text: str) -> None:
        """Ignore text."""

    def add_video(self, step: int, path: Path) -> None:
        """Ignore videos."""

    def advance(self, step: int, eta_s: float | None, doing: str = "") -> None:
        """Ignore steps."""

    def close(self) -> None:
        """Release nothing."""


class JsonLines(RowSink):
    """Append every row to a file, one JSON object a line; a number that is not finite becomes null.

    Every row is in the file once and whole, except that a kill can cut the last one, which the next start removes.
    A row that could not be written goes before the next one.

    Args:
        path: the file, made where it does not exist.
        keep_bytes: `position` at the checkpoint that the run goes on from. What was written later is removed, for
            the run will write it again. None keeps all.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self._lines = _Lines(path, keep_bytes)

    @property
    def position(self) -> int:
        """Bytes of the file so far, for `keep_bytes`."""
        return self._lines.position

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
        keep_bytes: as in `JsonLines`.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        self._lines = _Lines(path, keep_bytes)
        if self._lines.position == 0:
            self._lines.append("step,episode_reward")

    @property
    def position(self) -> int:
        """Bytes of the file so far, for `keep_bytes`."""
        return self._lines.position

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

    def __init__(self, path: Path, keep_bytes: int | None) -> None:
        _repair(path, keep_bytes)
        # Unbuffered: a line is one call to the operating system, and in the file when that returns.
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._torn_at: int | None = None

    @property
    def position(self) -> int:
        return self._file.seek(0, os.SEEK_END)

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


def _repair(path: Path, keep_bytes: int | None) -> None:
    """Remove what comes after `keep_bytes`, and a torn last line."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = content if keep_bytes is None else content[:keep_bytes]
    kept = kept[: kept.rfind(b"\n") + 1]
    if kept != content:
        _replace(path, kept)


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
