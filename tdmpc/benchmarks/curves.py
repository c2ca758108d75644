"""What a run reached, against the time that it is charged."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tdmpc.telemetry.history import Array, mean_curve
from tdmpc.training.progress import Phase

CHARGED = (Phase.SEEDING, Phase.PRETRAINING, Phase.TRAINING, Phase.MERGING)
"""The phases that count as training: not what the machine, a compiler or a measurement takes besides."""

Row = Mapping[str, Any]

_TAIL_BYTES = 1 << 16  # more than the two last rows take


def charged_s(row: Row) -> float:
    """Return the seconds that a run is charged up to a row of it."""
    return sum(row[f"progress/{phase}_s"] for phase in CHARGED)


def last_row(metrics: Path) -> Row | None:
    """Return the last whole row of a `metrics.jsonl`, without reading what comes long before; None for none yet."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # behind the last newline is nothing, or a row that is being written
    except FileNotFoundError:
        return None
    return json.loads(lines[-1]) if lines else None


@dataclass(frozen=True)
class Track:
    """Evaluations of a run, or the mean of those of workers that merge, over the time that was charged.

    Attributes:
        charged_s: `[N]`, increasing.
        returns: `[N]`.
        steps: `[N]`, of all workers together.
    """

    charged_s: Array
    returns: Array
    steps: Array

    def until(self, budget_s: float) -> "Track":
        """Return what lies within a budget, which ends at a point in between two evaluations, if there is a later one.

        A run is stopped a moment after its budget is used up, and evaluated there.
        """
        within = self.charged_s <= budget_s
        if within.all() or not len(self.charged_s):
            return self
        ends = [np.interp(budget_s, self.charged_s, values) for values in (self.returns, self.steps)]
        columns = (self.charged_s, self.returns, self.steps)
        return Track(*(np.append(column[within], end) for column, end in zip(columns, (budget_s, *ends), strict=True)))

    def time_to(self, threshold: float) -> float | None:
        """Return the seconds until the curve first is at a threshold or above; None if it never is."""
        reached = np.flatnonzero(self.returns >= threshold)
        if not len(reached):
            return None
        place = int(reached[0])
        if place == 0:
            return float(self.charged_s[0])
        low, high = self.returns[place - 1], self.returns[place]
        begin, end = self.charged_s[place - 1], self.charged_s[place]
        return float(begin + (end - begin) * (threshold - low) / (high - low))


def track_of(workers: Sequence[Sequence[Row]]) -> Track | None:
    """Return the mean return of workers, each given by its rows, at equal time; None where there is none.

    One run is a group of one. The curve covers the time that all workers have evaluations for.
    """
    curves = [[row for row in rows if row["kind"] == "eval" and "eval/episode_reward" in row] for rows in workers]
    times = [np.array([charged_s(row) for row in rows]) for rows in curves]
    returns = [np.array([row["eval/episode_reward"] for row in rows], float) for rows in curves]
    if not all(len(time) for time in times):
        return None
    mean = mean_curve(list(zip(times, returns, strict=True)))
    if mean is None:
        return None
    steps = np.sum([value_at(rows, "step", mean.x) for rows in workers], axis=0)
    return Track(mean.x, mean.mean, steps)


def value_at(rows: Sequence[Row], name: str, time_s: Array | float) -> Array:
    """Return a counter of every row at moments of the charged time; its last value after the end of the run."""
    times = np.array([charged_s(row) for row in rows])
    order = np.argsort(times, kind="stable")
    return np.asarray(np.interp(time_s, times[order], np.array([row[name] for row in rows], float)[order]))
