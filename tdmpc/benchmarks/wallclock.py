"""The suite `wallclock`: variants of training against wall-clock time; `plan.py` draws what it writes."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from envs import check_task
from tdmpc.benchmarks.compare import MACHINE_KEYS
from tdmpc.benchmarks.curves import last_row
from tdmpc.benchmarks.goals import goals_of
from tdmpc.benchmarks.machine import cores, describe_machine
from tdmpc.benchmarks.outcomes import read_outcome
from tdmpc.benchmarks.page import Report
from tdmpc.benchmarks.plan import Job, Plan, describe_plan, make_plan
from tdmpc.benchmarks.processes import TrainProcess
from tdmpc.benchmarks.runner import Interrupted, RunFailed, Runner, job_charged_s
from tdmpc.benchmarks.suite_bar import ASSUMED_WALL_PER_CHARGED, SuiteBar
from tdmpc.benchmarks.suites import WallclockConfig
from tdmpc.benchmarks.tables import Results, variant_table
from tdmpc.keys import ConfigError, shown
from tdmpc.telemetry.console import duration
from tdmpc.training.stopping import StopRequest

FAILED = 1
STATE = "benchmark.json"

NewRunner = Callable[..., Runner]


def run(config: WallclockConfig, base: Sequence[str], new_runner: NewRunner | None = None) -> None:
    """Run what is left of a benchmark, and write what it came to after every run.

    Args:
        config: of the suite.
        base: overrides of train.py that hold for all variants.
        new_runner: makes what carries out jobs; None for one that starts processes.

    Raises:
        ConfigError, TaskError: a key does not fit what it names.
        SystemExit: a run failed (code 1), or a signal has stopped the benchmark.
    """
    plan = make_plan(config, base, cores())
    for variant in plan.variants:
        check_task(plan.task, variant.config.env)
    _refuse_another(plan)
    new_runner = new_runner or partial(Runner, partial(TrainProcess, threads=plan.threads), plan.budget_s)
    if config.dry:
        print_dry(plan, [job for job in plan.jobs if not new_runner().is_done(job)])
        return
    with claimed(plan.out):
        machine = describe_plan_machine(plan)
        _keep_state(plan, machine)
        suite = Suite(plan, config.best, machine, new_runner)
        suite.run()
    print(f"\n{variant_table(suite.results()).markdown()}\nwrote {plan.out / 'report.html'}")
    if suite.failures:
        raise SystemExit(FAILED)


class Suite:
    """The runs of a plan, one after the other.

    Args:
        plan: what is run.
        best: return that counts as 100 %, as the user has set it.
        machine: what it runs on.
        new_runner: makes what carries out jobs.
    """

    def __init__(self, plan: Plan, best: float | None, machine: Mapping[str, Any], new_runner: NewRunner) -> None:
        self.plan, self.failures = plan, {}
        self._best, self._machine = best, machine
        self._charged_s = {job: min(job_charged_s(job), plan.budget_s) for job in plan.jobs}
        self._bar = SuiteBar(plan.budget_s * len(plan.jobs), sum(self._charged_s.values()), sys.stdout)
        self._stop = StopRequest()
        self._runner = new_runner(should_stop=self._stop, on_progress=self._advance)

    def run(self) -> None:
        """Run what is left. A run that fails does not stop the others.

        Raises:
            SystemExit: a signal has stopped it; the run under way is saved.
        """
        with closing(self._bar), self._stop.listening():
            for number, job in enumerate(self.plan.jobs, start=1):
                self._run_one(job, f"{number}/{len(self.plan.jobs)} {job}")
            self._write()

    def results(self) -> Results:
        """Return what is known so far."""
        done = [job for job in self.plan.jobs if self._runner.is_done(job)]
        outcomes = [outcome for job in done if (outcome := read_outcome(job, self.plan.budget_s))]
        goals = goals_of(self.plan.task, self._best, [outcome.track for outcome in outcomes])
        return Results(self.plan, outcomes, self.failures, goals)

    def _run_one(self, job: Job, name: str) -> None:
        if self._runner.is_done(job):
            self._bar.say(f"{name}: done before")
            return
        self._bar.say(f"{name}: {'goes on' if self._charged_s[job] else 'starts'}")
        try:
            self._runner.run(job)
        except RunFailed as error:
            self.failures[job] = str(error)
            self._bar.say(f"{name}: FAILED, {error}")
        except Interrupted:
            self._bar.say("stopped; the same command continues")
            raise SystemExit(self._stop.exit_code) from None
        self._advance(job, self.plan.budget_s)
        self._write()

    def _advance(self, job: Job, charged_s: float) -> None:
        self._charged_s[job] = charged_s
        self._bar.advance(sum(self._charged_s.values()), str(job))

    def _write(self) -> None:
        Report(self.results(), self._machine).write()


def print_dry(plan: Plan, left: Sequence[Job]) -> None:
    """Print what would be run, and how long it would take."""
    print("\n".join(describe_plan(plan)))
    charged = sum(plan.budget_s - min(job_charged_s(job), plan.budget_s) for job in left)
    ratios = [_wall_per_charged(job) for job in plan.jobs if job not in left]
    known = sum(ratios) / len(ratios) if ratios else ASSUMED_WALL_PER_CHARGED
    reason = f"as the {len(ratios)} before took" if ratios else "if compiling and evaluating take half as long again"
    print(
        f"{len(left)} of {len(plan.jobs)} runs are left: {duration(charged)} of training, "
        f"in all about {duration(known * charged)}, {reason}"
    )


def _wall_per_charged(job: Job) -> float:
    rows = [row for run in job.runs if (row := last_row(run / "metrics.jsonl"))]
    return max(row["elapsed_s"] for row in rows) / max(job_charged_s(job), 1.0)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold a directory for this process; it is made where it does not exist.

    Raises:
        ConfigError: another process holds it, or it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock").acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"out={out}: another process writes there; choose another out") from None
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written to ({error.strerror})") from None
    with lock:
        yield


def describe_plan_machine(plan: Plan) -> dict[str, Any]:
    """Return what the plan is carried out on."""
    on_cpu = plan.variants[0].config.device == "cpu" or not torch.cuda.is_available()
    return describe_machine(torch.device("cpu" if on_cpu else "cuda")) | {"threads": plan.threads}


def _refuse_another(plan: Plan) -> None:
    """Refuse a directory that holds another benchmark; more variants, seeds or minutes are the same one.

    Raises:
        ConfigError: it does.
    """
    before, now = _read_state(plan.out), _settings(plan)
    pairs = {name: (before.get(name, now[name]), now[name]) for name in ("task", "base", "threads")}
    for name, overrides in before.get("variants", {}).items():
        pairs[name] = (overrides, now["variants"].get(name, overrides))
    for name, (was, wanted) in pairs.items():
        if was != wanted:
            raise ConfigError(
                f"out={plan.out}: holds a benchmark with {name} {_told(was)}, here {_told(wanted)}; choose another out"
            )


def _told(value: object) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else shown(value)


def _settings(plan: Plan) -> dict[str, Any]:
    variants = {variant.name: list(variant.overrides) for variant in plan.variants}
    return {"task": plan.task, "base": list(plan.base), "threads": plan.threads, "variants": variants}


def _keep_state(plan: Plan, machine: dict[str, Any]) -> None:
    """Write down what is compared, variants of before too, and warn where it began on another machine."""
    before, now = _read_state(plan.out), _settings(plan)
    began_on = before.get("machine", machine)
    for name in MACHINE_KEYS:
        if began_on.get(name) != machine.get(name):
            print(f"warning: not measured alike: {name} {machine.get(name)} (was {began_on.get(name)})")
    state = now | {"variants": before.get("variants", {}) | now["variants"], "machine": began_on}
    (plan.out / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def _read_state(out: Path) -> dict[str, Any]:
    path = out / STATE
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        raise ConfigError(f"out={out}: {path} cannot be read; choose another out") from None
