"""Results as tables, for people and for programs."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from tdmpc.benchmarks.curves import CHARGED
from tdmpc.benchmarks.goals import PERCENTS, Goals
from tdmpc.benchmarks.outcomes import Outcome, directory_of, mean_time_to, speedup, time_to
from tdmpc.benchmarks.plan import Job, Plan
from tdmpc.benchmarks.variants import Variant, differences
from tdmpc.keys import shown
from tdmpc.training.progress import Phase

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """Cells of text under a head; the first column names the rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)

    def html(self) -> str:
        """Return it as HTML."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


@dataclass(frozen=True)
class Results:
    """All that is known so far.

    Attributes:
        plan: what is run.
        outcomes: of the jobs that are done.
        failures: the reasons of those that failed, by job.
        goals: returns to reach; None before anything was run.
    """

    plan: Plan
    outcomes: Sequence[Outcome]
    failures: Mapping[Job, str]
    goals: Goals | None

    def of(self, variant: Variant) -> list[Outcome]:
        """Return the outcomes of a variant."""
        return [outcome for outcome in self.outcomes if outcome.job.variant == variant.name]


def variant_table(results: Results) -> Table:
    """Return one line a variant."""
    times = [f"min to {percent} %" for percent in PERCENTS]
    head = ["variant", "runs", "steps", "return", *times, "steps/s", "speed-up", "memory"]
    return Table(head, [_variant_line(results, variant) for variant in results.plan.variants])


def phase_table(results: Results) -> Table:
    """Return where the seconds of a run went, one line a variant: charged phases first."""
    phases = [*CHARGED, *(phase for phase in Phase if phase not in CHARGED)]
    head = ["variant", *(phase if phase in CHARGED else f"({phase})" for phase in phases)]
    rows = []
    for variant in results.plan.variants:
        outcomes = results.of(variant)
        means = [_mean([outcome.phase_s[phase] for outcome in outcomes]) for phase in phases]
        rows.append([variant.name, *(UNKNOWN if mean is None else f"{mean:.0f} s" for mean in means)])
    return Table(head, rows)


def difference_table(plan: Plan) -> Table:
    """Return the keys in which variants differ."""
    lines = [[key, *map(shown, values)] for key, values in differences(plan.variants).items()]
    return Table(["key", *(variant.name for variant in plan.variants)], lines)


def results_csv(results: Results) -> str:
    """Return `results.csv`, one line a run; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    outcomes = {outcome.job: outcome for outcome in results.outcomes}
    for job in results.plan.jobs:
        status = "done" if job in outcomes else "failed" if job in results.failures else "open"
        line = {"variant": job.variant, "seed": job.seed, "status": status, "directory": directory_of(job)}
        writer.writerow(line | (_numbers(outcomes[job], results.goals) if job in outcomes else {}))
    return text.getvalue()


_COLUMNS = (
    *("variant", "seed", "status", "steps", "updates", "final_return"),
    *(f"time_to_{percent}_s" for percent in PERCENTS),
    *("steps_per_s", *(f"{phase}_s" for phase in Phase), "peak_bytes", "directory"),
)


def _numbers(outcome: Outcome, goals: Goals | None) -> dict[str, float | None]:
    times = {f"time_to_{percent}_s": _rounded(time_to(outcome, goals, percent)) for percent in PERCENTS}
    phases = {f"{phase}_s": _rounded(seconds) for phase, seconds in outcome.phase_s.items()}
    return {
        "steps": round(outcome.steps),
        "updates": round(outcome.updates),
        "final_return": _rounded(outcome.final_return),
        "steps_per_s": _rounded(outcome.steps_per_s),
        "peak_bytes": outcome.peak_bytes,
        **times,
        **phases,
    }


def _variant_line(results: Results, variant: Variant) -> list[str]:
    outcomes, planned = results.of(variant), len(results.plan.of(variant))
    runs = f"{len(outcomes)}" if len(outcomes) == planned else f"{len(outcomes)} of {planned}"
    return [variant.name, runs, *(_cells(results, variant, outcomes) if outcomes else [UNKNOWN] * 8)]


def _cells(results: Results, variant: Variant, outcomes: Sequence[Outcome]) -> Iterator[str]:
    goals, first = results.goals, results.plan.variants[0]
    yield f"{np.mean([outcome.steps for outcome in outcomes]):,.0f}"
    yield _mean_and_range([outcome.final_return for outcome in outcomes])
    for percent in PERCENTS:
        mean, reached = mean_time_to(outcomes, goals, percent)
        partly = f"{reached} of {len(outcomes)} runs" if reached else UNKNOWN
        yield partly if mean is None else f"{mean / 60:.2f}"
    pace = _mean([outcome.steps_per_s for outcome in outcomes])
    yield UNKNOWN if pace is None else f"{pace:.1f}"
    yield "1" if variant is first else _speedup_cell(results.of(first), outcomes, goals)
    peak = max((outcome.peak_bytes or 0 for outcome in outcomes), default=0)
    yield f"{peak / 1e9:.2f} GB" if peak else UNKNOWN


def _speedup_cell(first: Sequence[Outcome], outcomes: Sequence[Outcome], goals: Goals | None) -> str:
    gain = speedup(first, outcomes, goals)
    if gain is None:
        return UNKNOWN
    interval = "" if gain.interval is None else f" [{gain.interval[0]:.2f}, {gain.interval[1]:.2f}]"
    return f"{gain.ratio:.2f}{interval} in {gain.measure}"


def _mean_and_range(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.0f} to {max(values):.0f})"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
