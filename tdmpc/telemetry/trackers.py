"""Rows in TensorBoard and in Weights & Biases, and a thread for what may be slow."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# These classes are made while their modules are imported, where pyright cannot see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.scalar.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from tdmpc.telemetry.files import RowSink
from tdmpc.telemetry.metrics import COLUMNS, METRICS, ROW, cells, declaration
from tdmpc.telemetry.recorder import Row, Sink


class TrackerError(RuntimeError):
    """A tracker that cannot be used or does not keep up; the message is one line for whoever started the run."""


class TensorBoard(RowSink):
    """Write every value of a row as a curve over steps, with its meaning beside it.

    It writes events itself, because torch's `SummaryWriter` has no place for descriptions, and as tensors, because
    TensorBoard's fast loader shows a description for nothing else.

    Args:
        directory: gets one more event file at every start.
        resume_step: step of the checkpoint that the run goes on from; TensorBoard hides what earlier starts wrote
            for later steps, with its fast loader once the curve goes on. None hides nothing.
    """

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        self._described: set[str] = set()
        if resume_step is not None:
            self._hide_after(resume_step)

    def write(self, row: Row) -> None:
        """Write a row to the event file, where a running TensorBoard finds it at once."""
        summary = Summary(value=[self._value(name, value) for name, value in _curves(row).items()])
        self._writer.add_event(Event(wall_time=row["time"], step=row["step"], summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _hide_after(self, step: int) -> None:
        start = SessionLog(status=SessionLog.START)
        # TensorBoard takes the first start that it meets for the beginning of the run, and hides nothing at that one.
        for _ in range(2):
            self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _value(self, name: str, value: float) -> Summary.Value:
        tensor = make_tensor_proto(np.float32(value))
        if name in self._described:
            return Summary.Value(tag=name, tensor=tensor)
        # TensorBoard reads what stands beside a curve's first value; beside every value it would be most of the file.
        self._described.add(name)
        return Summary.Value(tag=name, tensor=tensor, metadata=create_summary_metadata("", _description(name)))


class WandB(RowSink):
    """Send rows to Weights & Biases, or with WANDB_MODE=offline into the run directory, for `wandb sync` later.

    W&B can take no row back: what a continued run does again after its checkpoint is there twice.

    Args:
        run: directory of the run. It keeps W&B's files and, in `wandb_id`, the id that makes a continued run the
            same run there.
        project: W&B project.
        group: what the seeds of one experiment share, `<task>-<exp_name>`.
        name: the run's name, `seed-<seed>`.
        config: every key of the run.
        entity: W&B user or team; None is the one whose key is used.
        silent: whether W&B prints nothing.
        finish_s: seconds that closing waits for the last rows to be sent; they stay on disk in any case.

    Raises:
        TrackerError: wandb is not installed, or it cannot start.
    """

    def __init__(
        self,
        run: Path,
        *,
        project: str,
        group: str,
        name: str,
        config: Mapping[str, Any],
        entity: str | None = None,
        silent: bool = False,
        finish_s: float = 45.0,
    ) -> None:
        wandb = self._wandb = _import_wandb()
        # Capturing the console would make every print wait for W&B.
        settings = wandb.Settings(silent=silent, console="off", finish_timeout=finish_s)
        try:
            self._run = wandb.init(
                dir=run,
                id=_stored_id(run / "wandb_id"),
                resume="allow",
                reinit="create_new",  # never an earlier run of the same process that has not finished
                project=project,
                entity=entity,
                group=group,
                name=name,
                config=dict(config),
                allow_val_change=True,  # a run may be continued with more steps
                settings=settings,
            )
        except wandb.Error as error:
            raise TrackerError(
                f"wandb cannot start: {_first_line(error)} (WANDB_MODE=offline needs no network)"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        # W&B has no place for the description of a metric, so all stand in a table beside the curves.
        table = wandb.Table(columns=list(COLUMNS), data=[list(cells(metric)) for metric in (*ROW, *METRICS)])
        self._run.log({"metrics": table}, commit=False)  # with the first row

    def write(self, row: Row) -> None:
        """Send a row."""
        # Without W&B's own step, which drops the rows that a continued run writes again.
        self._run.log(dict(row))

    def add_video(self, step: int, path: Path) -> None:
        """Send a copy of a video."""
        self._run.log({"step": step, "eval/video": self._wandb.Video(path, format="mp4")})

    def close(self) -> None:
        """Mark the run as finished and wait for its last rows, `finish_s` at most."""
        self._run.finish()


class Background(RowSink):
    """Hand rows and videos to another sink in a thread of its own, so that it never holds up training.

    What goes wrong there is raised by the next write, or by `close`.

    Args:
        sink: takes them; only the thread calls it.
        capacity: rows and videos that may wait for it; further ones are dropped.
        patience_s: seconds that `close` waits for it.
    """

    def __init__(self, sink: Sink, *, capacity: int = 100, patience_s: float = 60.0) -> None:
        self._sink, self._capacity, self._patience_s = sink, capacity, patience_s
        self._name = type(sink).__name__
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None is the end
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"telemetry-{self._name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Queue a row and return at once.

        Raises:
            TrackerError: too many wait, so this one is dropped; or the sink failed with an earlier one.
        """
        self._queue(lambda: self._sink.write(row))

    def add_video(self, step: int, path: Path) -> None:
        """Queue a video and return at once.

        Raises:
            TrackerError: as for a row.
        """
        self._queue(lambda: self._sink.add_video(step, path))

    def close(self) -> None:
        """Let the sink write what waits and close it, but wait no longer than `patience_s`.

        Raises:
            TrackerError: it did not finish in time, or failed.
        """
        self._calls.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            raise TrackerError(
                f"{self._name} did not finish within {self._patience_s:g} s; its last rows may be missing"
            )
        self._raise_failure()

    def _queue(self, call: Callable[[], None]) -> None:
        if self._calls.qsize() >= self._capacity:
            raise TrackerError(f"{self._name} does not keep up: {self._capacity} rows wait, so others are dropped")
        self._calls.put(call)
        self._raise_failure()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._attempt(call)
        self._attempt(self._sink.close)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TrackerError(f"{self._name} failed: {type(failure).__name__}: {_first_line(failure)}") from failure


def _curves(row: Row) -> dict[str, float]:
    """Return the values of a row that are no axis."""
    axes = {metric.name for metric in ROW}
    return {name: value for name, value in row.items() if name not in axes}


def _description(name: str) -> str:
    metric = declaration(name)
    return f"{metric.sentence} Unit: {metric.unit}." if metric.unit else metric.sentence


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _import_wandb() -> Any:
    try:
        import wandb  # an extra, and slow to import
    except ModuleNotFoundError as error:
        raise TrackerError(f"wandb cannot be imported ({error}): pip install wandb, the extra [wandb]") from None
    return wandb


def _stored_id(path: Path) -> str:
    """Return the id in the file, made up where there is none yet."""
    stored = path.read_text().strip() if path.exists() else ""
    if not stored:
        stored = secrets.token_hex(8)
        path.write_text(stored)
    return stored
