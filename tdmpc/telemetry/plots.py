"""Pictures of one run or of many, as PNG files.

Seeds of one experiment are drawn as one line, their mean, in a band from their least to their greatest value; so are
workers that merge, and the control beside them is a line of its own kind. Only `scripts/plot.py` imports this module,
so training neither waits for matplotlib nor needs it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from tdmpc.telemetry.history import Curve, Group, HistoryError, Shares, curve, find_runs, group_seeds, read_run, shares

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.use_mathtext": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 150,
}
# The colours of Okabe and Ito, which most people can tell apart, less the yellow that is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
LINE_STYLES = ("-", "--", ":", "-.")
CONTROL_COLOUR, CONTROL_STYLE = "#555555", (0, (5, 2))
SECTION_COLOURS = (*COLOURS[:-1], "#7B5EA7", "#8C510A", "#66A61E", "#F0E442", "#1B4F72", "#A6001A")
OTHER, OTHER_COLOUR = "other", "#C8C8C8"
BEHIND = 1.5  # the z-order between a grid and the lines
DECADE = 10
LEGEND_LINE_IN = 0.24


@dataclass
class Plotted:
    """What became of a request: the files written, and a sentence on everything that could not be drawn."""

    written: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """A horizontal axis: a column of the rows, how much of it is one unit of the axis, and the label."""

    column: str
    unit: float
    label: str


@dataclass(frozen=True)
class Panel:
    """A metric in the rows of a kind, its label, and a metric of the training rows that is drawn faintly behind it."""

    kind: str
    metric: str
    label: str
    behind: str = ""


class Picture(Protocol):
    """One side of the runs, drawn into one file."""

    @property
    def file(self) -> str:
        """Name of the file."""
        ...

    @property
    def needs(self) -> str:
        """What the rows must hold, in words."""
        ...

    def has_data(self, group: Group) -> bool:
        """Whether the rows of the group hold it."""
        ...

    def draw(self, groups: Sequence[Group], title: str) -> Figure:
        """Draw groups that have data."""
        ...


@dataclass(frozen=True)
class Lines:
    """Metrics over a column of the rows, a panel each; panels without data are left out."""

    file: str
    needs: str
    column: str
    panels: Sequence[Panel]

    def has_data(self, group: Group) -> bool:
        """Whether there is a point for any panel."""
        return bool(self._panels([group]))

    def draw(self, groups: Sequence[Group], title: str) -> Figure:
        """Draw the lines of all groups into the same panels."""
        panels, axis = self._panels(groups), _axis(self.column, groups)
        figure, grid = _grid(len(panels), min(len(panels), 3), title)
        for axes, panel in zip(grid, panels, strict=True):
            for group in groups:
                _draw_lines(axes, group, panel, axis)
            _finish(axes, panel, axis)
        _add_legend(figure, grid)
        return figure

    def _panels(self, groups: Sequence[Group]) -> list[Panel]:
        return [p for p in self.panels if any(curve(group, p.kind, self.column, p.metric) for group in groups)]


@dataclass(frozen=True)
class TimeShares:
    """Where the time went over the run, stacked; a panel a group. Areas are times, because x is the time as well."""

    file: str
    needs: str

    def has_data(self, group: Group) -> bool:
        """Whether any run timed its sections."""
        return shares(group) is not None

    def draw(self, groups: Sequence[Group], title: str) -> Figure:
        """Draw the panels below one another."""
        parts = {group.name: part for group in groups if (part := shares(group))}
        figure, grid = _grid(len(parts), 1, title)
        colours, axis = _section_colours([*parts.values()]), _axis("elapsed_s", groups)
        for axes, (name, part) in zip(grid, parts.items(), strict=True):
            _draw_shares(axes, part, colours, axis)
            axes.set_title(_caption(name, part.runs, "mean"), fontsize="medium")
        return figure


_RETURN = (Panel("eval", "eval/episode_reward", "Episode return", behind="train/episode_reward"),)
_LOSSES = tuple(
    Panel("train", f"train/{name}_loss", f"{label} loss")
    for name, label in {
        "total": "Total",
        "consistency": "Consistency",
        "reward": "Reward",
        "value": "Value",
        "pi": "Policy",
        "termination": "Termination",
    }.items()
)
_RATES = (
    Panel("train", "rate/steps_per_s", "Steps/s"),
    Panel("train", "rate/steady_steps_per_s", "Steps/s, steady"),
    Panel("train", "rate/updates_per_s", "Updates/s"),
)
PICTURES: tuple[Picture, ...] = (
    Lines("return_vs_steps.png", "evaluations", "step", _RETURN),
    Lines("return_vs_wallclock.png", "evaluations", "elapsed_s", _RETURN),
    Lines("losses.png", "losses", "step", _LOSSES),
    TimeShares("time_shares.png", "timed sections"),
    Lines("rates.png", "rates", "step", _RATES),
)


def plot_runs(directories: Iterable[Path], out: Path) -> Plotted:
    """Draw every picture that there is data for.

    Args:
        directories: run directories, or those of a group of workers; one that is named twice counts once.
        out: where the files go; made where it does not exist.

    Raises:
        HistoryError: a directory cannot be read as a run, or there is nothing to draw yet.
        OSError: a file cannot be read or written.
    """
    unique = {run.resolve(): run for directory in directories for run in find_runs(directory)}
    title, groups = group_seeds([read_run(directory) for directory in unique.values()])
    if not any(picture.has_data(group) for picture in PICTURES for group in groups):
        needs = dict.fromkeys(picture.needs for picture in PICTURES)
        raise HistoryError(f"nothing to draw yet: no {', no '.join(needs)}")
    out.mkdir(parents=True, exist_ok=True)
    plotted = Plotted()
    with rc_context(STYLE):
        for picture in PICTURES:
            _plot(picture, groups, title, out, plotted)
    return plotted


def _plot(picture: Picture, groups: Sequence[Group], title: str, out: Path, plotted: Plotted) -> None:
    drawn = [group for group in groups if picture.has_data(group)]
    if not drawn:
        plotted.notes.append(f"skipped {picture.file}: no {picture.needs} to draw yet")
        return
    absent = [group.name for group in groups if group not in drawn]
    plotted.notes += [f"left out of {picture.file}: {name}, no {picture.needs} to draw yet" for name in absent]
    picture.draw(drawn, title).savefig(out / picture.file)
    plotted.written.append(out / picture.file)


def _axis(column: str, groups: Sequence[Group]) -> Axis:
    if column == "step":
        return Axis(column, 1, "Environment steps")
    longest_s = max(row.get(column, 0) for group in groups for run in group.runs for row in run.rows)
    # Twice a unit, so that no axis has its ticks between 0 and 1.
    name, seconds = next((unit for unit in (("h", 3600), ("min", 60)) if longest_s > 2 * unit[1]), ("s", 1))
    return Axis(column, seconds, f"Wall-clock time ({name})")


def _grid(panels: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    rows = math.ceil(panels / columns)
    size = (7.2, 3.8 * rows) if columns == 1 else (3.5 * columns, 2.7 * rows)
    figure = Figure(figsize=size)
    figure.suptitle(title)
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(panels)]


def _draw_lines(axes: Axes, group: Group, panel: Panel, axis: Axis) -> None:
    colour, style = _look(group)
    behind = curve(group, "train", axis.column, panel.behind)
    if line := curve(group, panel.kind, axis.column, panel.metric):
        label = _caption(group.name, line.runs, "mean and min–max") or ("evaluation" if behind else "")
        marks = {"linestyle": style, "marker": _marker(line), "markersize": 4}
        axes.plot(line.x / axis.unit, line.mean, color=colour, label=label, **marks)
        if line.runs > 1:
            axes.fill_between(line.x / axis.unit, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    if behind:
        look = {"alpha": 0.35, "linewidth": 1, "zorder": BEHIND, "marker": _marker(behind), "markersize": 3}
        axes.plot(behind.x / axis.unit, behind.mean, color=colour, label="training episodes", **look)


def _look(group: Group) -> tuple[str, Any]:
    """Return colour and style of the line of a group."""
    if group.control:
        return CONTROL_COLOUR, CONTROL_STYLE
    return COLOURS[group.number % len(COLOURS)], LINE_STYLES[group.number // len(COLOURS) % len(LINE_STYLES)]


def _caption(name: str, runs: int, statistic: str) -> str:
    return ": ".join(part for part in (name, f"{statistic} of {runs} runs" if runs > 1 else "") if part)


def _marker(line: Curve) -> str:
    # The few evaluations of a run are shown as what they are; a single point would not be seen as a line at all.
    return "o" if len(line.x) == 1 or (line.runs == 1 and len(line.x) <= 40) else ""


def _finish(axes: Axes, panel: Panel, axis: Axis) -> None:
    _label_x(axes, axis)
    axes.set_ylabel(panel.label)
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    # Most losses fall by orders of magnitude, the policy goes below zero, random steps are far faster than others.
    if panel not in _RETURN and values.min() > 0 and values.max() > DECADE * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel in _RATES:
        axes.set_ylim(bottom=0)


def _label_x(axes: Axes, axis: Axis) -> None:
    axes.set_xlabel(axis.label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
    if axis.column == "step":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _add_legend(figure: Figure, grid: Sequence[Axes]) -> None:
    pairs = [pair for axes in grid for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    # The faint lines, which all groups have in common, are explained last.
    entries = {label: handle for handle, label in sorted(pairs, key=lambda pair: pair[0].get_zorder() == BEHIND)}
    if not entries:
        return
    columns = min(len(grid), 2)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_IN * math.ceil(len(entries) / columns))
    figure.legend([*entries.values()], [*entries], loc="outside lower center", ncols=columns)


def _section_colours(parts: Sequence[Shares]) -> dict[str, str]:
    """Give every section its colour in all panels, those that took most time first; they are stacked in this order."""
    names = {name for part in parts for name in part.sections if name != OTHER}
    total = {name: sum(part.overall(name) for part in parts if name in part.sections) for name in names}
    order = sorted(names, key=lambda name: (-total[name], name))
    colours = {name: SECTION_COLOURS[place % len(SECTION_COLOURS)] for place, name in enumerate(order)}
    return {**colours, OTHER: OTHER_COLOUR}


def _draw_shares(axes: Axes, part: Shares, colours: dict[str, str], axis: Axis) -> None:
    names = [name for name in colours if name in part.sections]
    # Every window is drawn from its beginning to its end, the first from 0.
    ends = np.concatenate([[0], part.end_s]) / axis.unit
    layers = [np.concatenate([share[:1], share]) for share in map(part.sections.__getitem__, names)]
    labels = [f"{name}  {part.overall(name):.1%}" for name in names]
    areas = axes.stackplot(ends, layers, step="pre", labels=labels, colors=[colours[name] for name in names])
    axes.legend([*reversed(areas)], [*reversed(labels)], loc="center left", bbox_to_anchor=(1.01, 0.5))
    _label_x(axes, axis)
    axes.set(ylabel="Share of time", xlim=(0, ends[-1]), ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
