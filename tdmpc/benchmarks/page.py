"""What a benchmark says: `results.csv`, `table.md`, the pictures, and `report.html` with all of it in one file."""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tdmpc.benchmarks.goals import PERCENTS
from tdmpc.benchmarks.pictures import draw
from tdmpc.benchmarks.tables import Results, Table, difference_table, phase_table, results_csv, variant_table

PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "mujoco", "dm_control", "hydra-core")
TITLES = {
    "return_vs_wallclock.png": "Return against training time",
    "return_vs_steps.png": "Return against steps",
    "time_shares.png": "Where the time went",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd }
th { text-align: left } td + td { text-align: right } img { max-width: 100%; display: block }
code, pre { font-size: 13px } pre { background: #f6f6f6; padding: .7rem; overflow-x: auto }
"""


@dataclass(frozen=True)
class Report:
    """Everything that is written about a benchmark.

    Attributes:
        results: what is known.
        machine: what it was measured on.
    """

    results: Results
    machine: Mapping[str, Any]

    def write(self) -> None:
        """Write all files; those of an earlier time are replaced."""
        results, out = self.results, self.results.plan.out
        (out / "results.csv").write_text(results_csv(results), encoding="utf-8")
        (out / "table.md").write_text(self.markdown(), encoding="utf-8")
        pictures = draw(results, out)
        (out / "report.html").write_text(self.html(pictures), encoding="utf-8")

    def markdown(self) -> str:
        """Return `table.md`."""
        notes = "".join(f"- {note}\n" for note in self.notes())
        return f"{variant_table(self.results).markdown()}\n{phase_table(self.results).markdown()}\n{notes}"

    def html(self, pictures: list[Path]) -> str:
        """Return `report.html`, which needs no other file."""
        plan = self.results.plan
        parts = [
            variant_table(self.results).html(),
            _list(self.notes()),
            *map(_picture, pictures),
            "<h2>Seconds of a run</h2>",
            phase_table(self.results).html(),
            "<h2>How the variants differ</h2>",
            difference_table(plan).html(),
            f"<p>For all of them: <code>{escape(' '.join(plan.base))}</code></p>",
            "<h2>Commands</h2>",
            f"<pre>{escape(chr(10).join(job.command for job in plan.jobs))}</pre>",
            "<h2>Machine and versions</h2>",
            self.machine_table().html(),
        ]
        title = f"{plan.task}: variants against wall-clock time"
        head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        return f"<!doctype html><html><head>{head}</head><body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"

    def notes(self) -> Iterator[str]:
        """Say how to read the table, and what failed."""
        plan, goals, seeds = self.results.plan, self.results.goals, sorted({job.seed for job in self.results.plan.jobs})
        yield (
            f"{plan.task}, {plan.budget_s / 60:g} minutes of training a run, {plan.threads} CPU threads a variant, "
            f"seeds {', '.join(map(str, seeds))}. Seeding, pretraining, training and merging are charged; the phases "
            "in brackets are not."
        )
        yield "Returns are means over seeds of the evaluation at the end of the budget, with least and greatest."
        if goals is not None:
            thresholds = ", ".join(f"{goals.threshold(percent):.4g} ({percent} %)" for percent in PERCENTS)
            yield f"Best return: {goals}. Times are to the first evaluation of at least {thresholds}, interpolated."
        yield (
            f"Speed-ups are against {plan.variants[0].name}, with a 95 % bootstrap interval over seeds, rough where "
            "these are few: in the time to 80 % where all runs reach it, else in steps/s, which says nothing of "
            "learning."
        )
        if any(variant.workers > 1 for variant in plan.variants):
            yield "Of workers that merge, steps, steps/s and memory are sums; the return is their mean at equal time."
        yield from (f"FAILED: {job}: {reason}" for job, reason in self.results.failures.items())

    def machine_table(self) -> Table:
        """Return what it was measured on, with the versions of what matters and the commits of all runs."""
        facts = {name: value for name, value in self.machine.items() if name not in ("commit", "torch")}
        versions = {package: found for package in PACKAGES if (found := _version(package))}
        commits = {"commit": ", ".join(sorted(self._commits())) or str(self.machine.get("commit"))}
        rows = [[name, str(value)] for name, value in (facts | versions | commits).items()]
        return Table(["", ""], rows)

    def _commits(self) -> set[str]:
        files = [run / "provenance.json" for outcome in self.results.outcomes for run in outcome.job.runs]
        found = {file: json.loads(file.read_text(encoding="utf-8")).get("commit") for file in files if file.exists()}
        changed = {file: " with changes" if (file.parent / "git.diff").exists() else "" for file in found}
        return {f"{commit}{changed[file]}" for file, commit in found.items() if commit}


def _list(lines: Iterator[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _picture(path: Path) -> str:
    title, content = TITLES[path.name], base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{content}">'


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
