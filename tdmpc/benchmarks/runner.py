"""Carry out a job: train until the budget is used up, stop, and evaluate what was reached."""

import itertools
import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tdmpc.benchmarks.curves import Row, charged_s, last_row
from tdmpc.benchmarks.plan import Job
from tdmpc.benchmarks.processes import Process

STOPPED = 128 + signal.SIGTERM
_HINT = "Set the environment variable HYDRA_FULL_ERROR"  # with which Hydra ends what it says of an exception
POLLS_PER_LOOK_AT_MEMORY = 5  # which takes longer than a look at a file

Start = Callable[[Sequence[str], Path], Process]


class RunFailed(RuntimeError):
    """A run that did not end well; the message is one line."""


class Interrupted(Exception):
    """The benchmark was asked to stop; the run under way has saved."""


class Runner:
    """Run jobs, one after the other.

    A run is stopped by a signal, as a user would, once its own record says that its budget is used up. The same
    command with as many `steps` as it has done then makes it evaluate and end. So a run that was stopped at any
    moment, by whatever, goes on where it was, and one that is finished is known by its own `summary.json`.

    Args:
        start: starts a process with arguments of train.py and a log.
        budget_s: seconds of training.
        should_stop: whether to stop the run under way, and the benchmark.
        on_progress: told the job under way and the seconds that it has been charged.
        sleep: waits so many seconds.
        poll_s: seconds between looks at the run.
    """

    def __init__(
        self,
        start: Start,
        budget_s: float,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Job, float], None] = lambda job, seconds: None,
        sleep: Callable[[float], None] = time.sleep,
        poll_s: float = 1.0,
    ) -> None:
        self._start, self.budget_s = start, budget_s
        self._should_stop, self._on_progress, self._sleep, self._poll_s = should_stop, on_progress, sleep, poll_s

    def is_done(self, job: Job) -> bool:
        """Tell whether nothing is left to do: budget or steps are used up, and the result is evaluated."""
        return is_finished(job) and (self._used_up(job) or _least_step(job) >= job.steps)

    def run(self, job: Job) -> None:
        """Do what is left of a job.

        Raises:
            RunFailed: a process did not end well.
            Interrupted: the benchmark was asked to stop.
        """
        if not self._used_up(job):
            self._attend(job, job.arguments, until_used_up=True)
        if not is_finished(job):
            compiled = any(row["progress/compiling_s"] > 0 for row in _last_rows(job) if row)
            self._attend(job, job.ending_at(_least_step(job), compiled=compiled), until_used_up=False)

    def _used_up(self, job: Job) -> bool:
        return job_charged_s(job) >= self.budget_s

    def _attend(self, job: Job, arguments: Sequence[str], *, until_used_up: bool) -> None:
        """Run a process to its end, which comes by itself or when the budget is used up."""
        process, stopping, looks = self._start(arguments, job.log), False, itertools.count()
        try:
            while (code := process.poll()) is None:
                if next(looks) % POLLS_PER_LOOK_AT_MEMORY == 0:
                    _note_memory(job, process.memory_bytes())
                self._on_progress(job, min(job_charged_s(job), self.budget_s))
                if not stopping and (self._should_stop() or (until_used_up and self._used_up(job))):
                    stopping = True
                    process.stop()
                self._sleep(self._poll_s)
        except BaseException:
            process.kill()
            raise
        if self._should_stop():
            raise Interrupted
        if code != 0 and not (stopping and code == STOPPED):
            raise RunFailed(f"exit code {code}: {_last_words(job.log)} (see {job.log})")


def is_finished(job: Job) -> bool:
    """Tell whether all runs of a job have ended by themselves."""
    return all(_summary_says_finished(run / "summary.json") for run in job.runs)


def job_charged_s(job: Job) -> float:
    """Return the seconds that a job has been charged: those of the worker that is least far."""
    return min(charged_s(row) if row else 0.0 for row in _last_rows(job))


def peak_bytes(job: Job) -> int | None:
    """Return the most memory that was seen in use; None where none was."""
    path = _memory_file(job)
    return int(path.read_text()) if path.exists() else None


def _last_rows(job: Job) -> list[Row | None]:
    return [last_row(run / "metrics.jsonl") for run in job.runs]


def _least_step(job: Job) -> int:
    return int(min(row["step"] if row else 0 for row in _last_rows(job)))


def _summary_says_finished(path: Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["ending"] == "finished"
    except (OSError, ValueError):
        return False


def _memory_file(job: Job) -> Path:
    return job.log.with_suffix(".peak_bytes")


def _note_memory(job: Job, now: int) -> None:
    if now > (peak_bytes(job) or 0):
        _memory_file(job).write_text(str(now))


def _last_words(log: Path) -> str:
    """Return the line of a log that says best why it ends: the last error, else the last line."""
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []
    said = [line for line in lines if line and not line.startswith(_HINT)]
    errors = [line for line in said[-20:] if line.startswith("error:")]
    return (errors or said or ["it printed nothing"])[-1]
