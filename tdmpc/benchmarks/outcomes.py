"""What runs came to, and what that says of their variants."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tdmpc.benchmarks.curves import CHARGED, Row, Track, track_of, value_at
from tdmpc.benchmarks.goals import PERCENTS, Goals
from tdmpc.benchmarks.plan import Job
from tdmpc.benchmarks.runner import peak_bytes
from tdmpc.intervals import Interval, ratio_interval
from tdmpc.telemetry.history import read_rows
from tdmpc.training.progress import Phase


@dataclass(frozen=True)
class Outcome:
    """What a job came to within its budget; of workers that merge, counts are sums and times and returns are means.

    Attributes:
        job: what was run.
        track: its evaluations.
        steps: done.
        updates: done.
        steps_per_s: while training, without the seeding phase; None where it did not come that far.
        phase_s: seconds in every phase, over the whole run.
        peak_bytes: most memory that was seen in use; None where it was not seen.
    """

    job: Job
    track: Track
    steps: float
    updates: float
    steps_per_s: float | None
    phase_s: Mapping[Phase, float]
    peak_bytes: int | None

    @property
    def final_return(self) -> float:
        """Return of the evaluation at the end of the budget."""
        return float(self.track.returns[-1])


@dataclass(frozen=True)
class Speedup:
    """How many times as fast as the first variant, over the seeds that both have run.

    Attributes:
        ratio: above 1 is faster.
        interval: 95 % bootstrap interval over the seeds; None for a single seed.
        measure: what is compared.
    """

    ratio: float
    interval: Interval | None
    measure: str


def read_outcome(job: Job, budget_s: float) -> Outcome | None:
    """Read a job from its run directories; None where it has not been evaluated."""
    workers = [read_rows(run / "metrics.jsonl") for run in job.runs if (run / "metrics.jsonl").exists()]
    track = track_of(workers) if len(workers) == len(job.runs) else None
    if track is None:
        return None
    rates = [rate for rows in workers if (rate := steps_per_s(rows)) is not None]
    return Outcome(
        job=job,
        track=track.until(budget_s),
        steps=_at_end(workers, "step", budget_s),
        updates=_at_end(workers, "updates", budget_s),
        steps_per_s=sum(rates) if len(rates) == len(workers) else None,
        phase_s={phase: float(np.mean([rows[-1][f"progress/{phase}_s"] for rows in workers])) for phase in Phase},
        peak_bytes=peak_bytes(job),
    )


def time_to(outcome: Outcome, goals: Goals | None, percent: int) -> float | None:
    """Return the charged seconds to a share of the best; None where it is not reached."""
    return goals.time_to(percent, outcome.track) if goals else None


def mean_time_to(outcomes: Sequence[Outcome], goals: Goals | None, percent: int) -> tuple[float | None, int]:
    """Return the mean time to a share of the best, None unless all runs reach it, and how many do."""
    times = [time_to(outcome, goals, percent) for outcome in outcomes]
    reached = [time for time in times if time is not None]
    return (sum(reached) / len(reached) if reached and len(reached) == len(times) else None), len(reached)


def speedup(first: Sequence[Outcome], other: Sequence[Outcome], goals: Goals | None) -> Speedup | None:
    """Compare a variant with the first one: in the time to 80 % where all runs reach it, else in steps per second.

    None where they have no seed in common, or no speed.
    """
    by_seed = {outcome.job.seed: outcome for outcome in first}
    pairs = [(by_seed[outcome.job.seed], outcome) for outcome in other if outcome.job.seed in by_seed]
    if not pairs:
        return None
    times = [(time_to(before, goals, PERCENTS[1]), time_to(now, goals, PERCENTS[1])) for before, now in pairs]
    if all(before and now for before, now in times):
        return _ratio(times, f"time to {PERCENTS[1]} %")
    return _ratio([(now.steps_per_s, before.steps_per_s) for before, now in pairs], "steps/s")


def _ratio(pairs: Sequence[tuple[float | None, float | None]], measure: str) -> Speedup | None:
    above = [first for first, _ in pairs if first]
    below = [second for _, second in pairs if second]
    if len(above) != len(pairs) or len(below) != len(pairs):
        return None
    return Speedup(math.fsum(above) / math.fsum(below), ratio_interval(above, below), measure)


def _at_end(workers: Sequence[Sequence[Row]], name: str, budget_s: float) -> float:
    return float(sum(value_at(rows, name, budget_s) for rows in workers))


def steps_per_s(rows: Sequence[Row]) -> float | None:
    """Return the pace since the end of pretraining."""
    last = rows[-1]
    begin = next((row for row in reversed(rows) if row["kind"] == "pretrain"), None)
    if begin is None:
        return None
    seconds = sum(last[f"progress/{phase}_s"] - begin[f"progress/{phase}_s"] for phase in CHARGED)
    return (last["step"] - begin["step"]) / seconds if seconds > 0 else None


def directory_of(job: Job) -> Path:
    """Return the directory of a run, or of a group of workers."""
    return job.runs[0] if len(job.runs) == 1 and not job.runs[0].name.startswith("worker-") else job.runs[0].parent
