"""Runs as they lie on disk, read back as curves: of one run, or averaged over the seeds of an experiment."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Series: TypeAlias = tuple[Array, Array]
"""x [N], increasing, and y [N]."""

_OUTERMOST_SHARE = re.compile(r"time/([^/]+)/share")


class HistoryError(ValueError):
    """A directory without a run that can be read or shown; the message is one line for whoever named it."""


@dataclass(frozen=True)
class Run:
    """A run as it was named, and its rows, oldest first: the `kind` of each and those values that are finite.

    Where it is one of workers that merge, `role` says so; that of the one that trains alone is `CONTROL`.
    """

    task: str
    exp_name: str
    rows: Sequence[Mapping[str, Any]]
    role: str = ""


CONTROL = "control"
"""The role of a worker that trains alone beside others that merge."""


@dataclass(frozen=True)
class Group:
    """The seeds of one experiment, or of one role in it, the workers of which count like seeds.

    `number` counts the groups from 0, `name` (empty for a single group) is its own. A control is told by `control`.
    """

    number: int
    name: str
    runs: Sequence[Run]
    control: bool = False


@dataclass(frozen=True)
class Curve:
    """Runs as one line: `x` and over it the runs' `mean`, least (`low`) and greatest value (`high`), all [N]."""

    x: Array
    mean: Array
    low: Array
    high: Array
    runs: int


@dataclass(frozen=True)
class Shares:
    """Where the time of runs went: windows that end at `end_s` [N], and each section's share [N] of each, 0 to 1."""

    end_s: Array
    sections: Mapping[str, Array]
    runs: int

    def overall(self, section: str) -> float:
        """Return the section's share, 0 to 1, of all windows together."""
        lengths = np.diff(self.end_s, prepend=0.0)
        return float(self.sections[section] @ lengths / lengths.sum())


def find_runs(directory: Path) -> list[Path]:
    """Return the runs of the workers that merge in a directory; a directory without any is a run itself."""
    if (directory / "metrics.jsonl").exists():
        return [directory]
    workers = [path.parent for path in directory.glob("worker-*/metrics.jsonl")]
    return sorted(workers, key=lambda path: (len(path.name), path.name)) or [directory]


def read_run(directory: Path) -> Run:
    """Return the run in a directory. One without a `config.yaml` goes by its path and is no other run's seed.

    Raises:
        HistoryError: there is no `metrics.jsonl`, or a file is not what its name says.
        OSError: a file cannot be read.
    """
    if not directory.is_dir():
        raise HistoryError(f"{directory}: there is no such directory")
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise HistoryError(f"{directory}: holds no metrics.jsonl; name runs, as in runs/<task>/<exp_name>/seed-1")
    config = _read_config(directory / "config.yaml")
    names = str(config.get("task", "")), str(config.get("exp_name", directory))
    return Run(*names, read_rows(metrics), _role(config.get("merge") or {}))


def _role(merge: Mapping[str, Any]) -> str:
    strategy = merge.get("strategy", "none")
    if strategy == "none":
        return ""
    return CONTROL if merge.get("control") and merge.get("worker") == 0 else f"merge={strategy}"


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise HistoryError(f"{path}: is not a configuration")
    return config


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a `metrics.jsonl`, less a last one that a running or killed run left unfinished.

    Raises:
        HistoryError: any other line is not a row.
    """
    rows = [_row(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    for number, row in enumerate(rows[:-1], start=1):
        if row is None:
            raise HistoryError(f"{path}: line {number} is not a row")
    return [row for row in rows if row is not None]


def _row(line: str) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    return {"kind": row.get("kind")} | {name: value for name, value in row.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def group_seeds(runs: Sequence[Run]) -> tuple[str, list[Group]]:
    """Put runs of the same task, `exp_name` and role together.

    Returns:
        What all of them share, as a title, and the groups.
    """
    members: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        members[run.task, run.exp_name, run.role].append(run)
    shared = [len(set(names)) == 1 for names in zip(*members, strict=True)]

    def parts(key: tuple[str, str, str], wanted: bool) -> str:
        return " · ".join(part for part, same in zip(key, shared, strict=True) if part and same is wanted)

    numbered = enumerate(members.items())
    groups = [Group(number, parts(key, False), seeds, key[-1] == CONTROL) for number, (key, seeds) in numbered]
    return parts(next(iter(members)), True), groups


def curve(group: Group, kind: str, x: str, y: str) -> Curve | None:
    """Return the mean of `y` over `x` of those runs whose rows of that kind have both; None where there is none."""
    return mean_curve([series for run in group.runs if (series := run_series(run, kind, x, y))])


def run_series(run: Run, kind: str, x: str, y: str) -> Series | None:
    """Return `y` over `x` in the rows of a kind; of rows with the same x, the last. None where there is none."""
    values = {row[x]: row[y] for row in run.rows if row["kind"] == kind and x in row and y in row}
    grid = sorted(values)
    return (np.array(grid, float), np.array([values[place] for place in grid], float)) if values else None


def mean_curve(series: Sequence[Series]) -> Curve | None:
    """Average runs over the stretch that all of them cover; None where there is none.

    Beyond it the mean would jump at every place where a run begins or ends. The grid is every run's points; between
    its own points a run is interpolated.
    """
    grid = _union([x for x, _ in series])
    for x, _ in series:
        grid = grid[(x[0] <= grid) & (grid <= x[-1])]
    if not len(grid):
        return None
    values = np.stack([np.interp(grid, x, y) for x, y in series])
    return Curve(grid, values.mean(0), values.min(0), values.max(0), len(series))


def shares(group: Group) -> Shares | None:
    """Return the mean over those runs that timed their sections, up to where the first of them ends."""
    runs = [run for run in map(run_shares, group.runs) if run]
    grid = _union([run.end_s for run in runs])
    for run in runs:
        grid = grid[grid <= run.end_s[-1]]
    names = sorted({name for run in runs for name in run.sections})
    return Shares(grid, {name: _mean_share(runs, name, grid) for name in names}, len(runs)) if runs else None


def run_shares(run: Run) -> Shares | None:
    """Return the shares of the outermost sections and `other` by window; None where no row has any."""
    rows = {row["elapsed_s"]: row for row in run.rows if row.get("elapsed_s", 0) > 0 and _sections(row)}
    ends = sorted(rows)
    names = sorted({name for row in rows.values() for name in _sections(row)})
    # A section that did not run in a window is absent from its row, and took none of it.
    sections = {name: np.array([rows[end].get(f"time/{name}/share", 0) for end in ends], float) for name in names}
    return Shares(np.array(ends, float), sections, 1) if rows else None


def _sections(row: Mapping[str, Any]) -> set[str]:
    return {match[1] for match in map(_OUTERMOST_SHARE.fullmatch, row) if match}


def _mean_share(runs: Sequence[Shares], section: str, grid: Array) -> Array:
    # A share holds for its whole window: the one that ends at or after a point of the grid is the point's.
    return np.mean([run.sections.get(section, 0 * run.end_s)[np.searchsorted(run.end_s, grid)] for run in runs], axis=0)


def _union(grids: Sequence[Array]) -> Array:
    return np.unique(np.concatenate([*grids, np.empty(0)]))
