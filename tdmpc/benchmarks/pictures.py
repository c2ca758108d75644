"""Pictures of a benchmark: return against time and steps, and where the time went."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tdmpc.benchmarks.curves import Track
from tdmpc.benchmarks.goals import PERCENTS
from tdmpc.benchmarks.outcomes import Outcome
from tdmpc.benchmarks.tables import Results
from tdmpc.telemetry.history import Series, mean_curve
from tdmpc.telemetry.plots import COLOURS, LINE_STYLES, OTHER, OTHER_COLOUR, SECTION_COLOURS, STYLE

FILES = ("return_vs_wallclock.png", "return_vs_steps.png", "time_shares.png")
NOT_CHARGED = ("compile", "evaluate", "save")
"""Outermost sections that do not count as training."""

_SMALL_SHARE = 0.01


def draw(results: Results, out: Path) -> list[Path]:
    """Draw what there are outcomes for, and return the files."""
    if not results.outcomes:
        return []
    draws: Sequence[Callable[[Results], Figure]] = (_against_time, _against_steps, _time_shares)
    paths = [out / file for file in FILES]
    with rc_context(STYLE):
        for path, make in zip(paths, draws, strict=True):
            make(results).savefig(path)
    return paths


def _against_time(results: Results) -> Figure:
    figure = _returns(results, "Training time (min)", lambda track: (track.charged_s / 60, track.returns))
    figure.axes[0].set_xlim(left=0)
    return figure


def _against_steps(results: Results) -> Figure:
    figure = _returns(results, "Environment steps, of all workers", lambda track: (track.steps, track.returns))
    figure.axes[0].xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _returns(results: Results, label: str, series: Callable[[Track], Series]) -> Figure:
    figure = Figure(figsize=(7.2, 4.4))
    axes = figure.add_subplot()
    for number, variant in enumerate(results.plan.variants):
        line = mean_curve([series(outcome.track) for outcome in results.of(variant)])
        if line is None:
            continue
        colour, style = COLOURS[number % len(COLOURS)], LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
        name = variant.name if line.runs == 1 else f"{variant.name}: mean and min–max of {line.runs} runs"
        # The points of a mean are those of all its runs, which says nothing.
        marker = "o" if line.runs == 1 else ""
        axes.plot(line.x, line.mean, color=colour, linestyle=style, marker=marker, markersize=3, label=name)
        if line.runs > 1:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    _mark_goals(axes, results)
    axes.set(xlabel=label, ylabel="Episode return", title=results.plan.task)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _mark_goals(axes: Axes, results: Results) -> None:
    """Draw the returns whose times are compared, as far as they are near what was reached."""
    goals, highest = results.goals, max(float(outcome.track.returns.max()) for outcome in results.outcomes)
    if goals is None:
        return
    for percent in PERCENTS:
        threshold = goals.threshold(percent)
        if threshold <= highest + 0.25 * abs(goals.best - goals.floor):
            axes.axhline(threshold, color="#888888", linewidth=0.8, linestyle=":", zorder=1)
            axes.annotate(f"{percent} %", (1, threshold), xycoords=("axes fraction", "data"), fontsize=8)


def _time_shares(results: Results) -> Figure:
    """Draw the minutes of a run, everything included, as a bar a variant."""
    means = {variant.name: _mean_sections(results.of(variant)) for variant in results.plan.variants}
    bars = _without_slivers({name: sections for name, sections in means.items() if sections})
    figure = Figure(figsize=(7.2, 1.9 + 0.5 * len(bars)))
    axes = figure.add_subplot()
    left = np.zeros(len(bars))
    for name, colour in _section_colours(bars).items():
        minutes = np.array([sections.get(name, 0) / 60 for sections in bars.values()])
        free = name in NOT_CHARGED
        look = {"hatch": "///", "alpha": 0.45, "edgecolor": "white"} if free else {}
        axes.barh([*bars], minutes, left=left, color=colour, label=f"{name} (not charged)" if free else name, **look)
        left += minutes
    axes.invert_yaxis()
    axes.set(xlabel="Minutes of a run (mean of runs and workers)", title=results.plan.task)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _mean_sections(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the mean seconds in every outermost section, of all runs and workers."""
    summaries = [run / "summary.json" for outcome in outcomes for run in outcome.job.runs]
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in summaries if path.exists()]
    total: dict[str, float] = {}
    for content in contents:
        own = {name: stats["total_s"] for name, stats in content["sections"].items() if "/" not in name}
        for name, seconds in (own | {OTHER: content["other_s"]}).items():
            total[name] = total.get(name, 0) + seconds / len(contents)
    return total


def _without_slivers(bars: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Count sections that are too short to be seen in any bar as `other`."""
    least = _SMALL_SHARE * max((sum(sections.values()) for sections in bars.values()), default=0)
    seen = {name for sections in bars.values() for name, seconds in sections.items() if seconds > least} - {OTHER}
    return {
        bar: {name: sections[name] for name in sections if name in seen}
        | {OTHER: sum(seconds for name, seconds in sections.items() if name not in seen)}
        for bar, sections in bars.items()
    }


def _section_colours(bars: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Give every section its colour in the order of stacking: the longest first, those not charged last."""
    longest = {name: max(s.get(name, 0) for s in bars.values()) for sections in bars.values() for name in sections}
    order = sorted(longest, key=lambda name: (name in NOT_CHARGED, name == OTHER, -longest[name]))
    named = [name for name in order if name != OTHER]
    colours = {name: SECTION_COLOURS[place % len(SECTION_COLOURS)] for place, name in enumerate(named)}
    return {name: colours.get(name, OTHER_COLOUR) for name in order}
