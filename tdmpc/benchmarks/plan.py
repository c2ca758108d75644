"""What is to be run: every variant with every seed, in turns.

A benchmark writes::

    <out>/
        benchmark.json    what it compares
        runs/             run directories, <task>/<variant>/seed-<seed>[/worker-<i>]
        logs/             what each run printed, <variant>-seed-<seed>.log
        results.csv, table.md, *.png, report.html
"""

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tdmpc.benchmarks.suites import TRAIN_DEFAULTS, WallclockConfig, key_of
from tdmpc.benchmarks.variants import Variant, read_variant, train_arguments
from tdmpc.config import UNSAFE_IN_A_NAME, run_directory
from tdmpc.keys import require

FOLDER = Path("runs/benchmark")


@dataclass(frozen=True)
class Job:
    """A run of train.py, or of a group of workers.

    Attributes:
        variant: name of what is run.
        seed: of the run.
        arguments: of train.py.
        runs: directories of the runs whose curves are the variant's.
        log: file for what it prints.
        steps: at which it ends, if the budget does not end it before.
    """

    variant: str
    seed: int
    arguments: tuple[str, ...]
    runs: tuple[Path, ...]
    log: Path
    steps: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    @property
    def command(self) -> str:
        """The command as a user would write it."""
        return shlex.join(["python", "scripts/train.py", *self.arguments])

    def ending_at(self, steps: int, *, compiled: bool) -> tuple[str, ...]:
        """Return arguments with which the run ends once it has done so many steps, acting as it did before."""
        kept = [text for text in self.arguments if key_of(text) not in ("steps", "compile")]
        return (*kept, f"steps={steps}", f"compile={str(compiled).lower()}")


@dataclass(frozen=True)
class Plan:
    """All of a benchmark.

    Attributes:
        variants: what is compared.
        jobs: in the order in which they are run: all variants with the first seed, then with the next.
        base: overrides that hold for all variants.
        task: that they solve.
        budget_s: seconds that a run is charged at most.
        threads: CPU threads of a variant.
        out: directory of runs and results.
    """

    variants: tuple[Variant, ...]
    jobs: tuple[Job, ...]
    base: tuple[str, ...]
    task: str
    budget_s: float
    threads: int
    out: Path

    def of(self, variant: Variant) -> list[Job]:
        """Return the jobs of a variant."""
        return [job for job in self.jobs if job.variant == variant.name]


def make_plan(config: WallclockConfig, base: Sequence[str], cores: int) -> Plan:
    """Decide what is run.

    Args:
        config: of the suite.
        base: overrides that hold for all variants.
        cores: of the machine.

    Raises:
        ConfigError: a variant cannot be run.
    """
    given = {key_of(text) for text in base}
    base = (*(text for text in TRAIN_DEFAULTS if key_of(text) not in given), *base)
    variants = [read_variant(text, [*base, f"task={config.task}"]) for text in config.variants]
    for name, count in Counter(variant.name for variant in variants).items():
        require(count == 1, "variants", name, f"is the name of {count} variants; must be that of one")
    out = Path(config.out) if config.out else FOLDER / f"wallclock-{UNSAFE_IN_A_NAME.sub('-', config.task).strip('-.')}"
    plan = Plan(
        variants=tuple(variants),
        jobs=(),
        base=base,
        task=config.task,
        budget_s=60 * config.budget_minutes,
        threads=config.threads or cores,
        out=out,
    )
    # Seed by seed, so that a machine that changes its pace does so for all variants.
    jobs = [make_job(plan, variant, seed) for seed, variant in itertools.product(config.seeds, variants)]
    return replace(plan, jobs=tuple(jobs))


def make_job(plan: Plan, variant: Variant, seed: int, **more: str | int) -> Job:
    """Return the job of a variant with a seed; `more` are keys of train.py that the suite decides besides."""
    root = plan.out / "runs"
    threads = max(1, plan.threads // variant.workers)
    own = {"task": plan.task, "seed": seed, "exp_name": variant.name, "run_root": str(root), **more}
    if "threads" not in variant.sets:
        own["threads"] = threads
    config = replace(variant.config, task=plan.task, seed=seed, exp_name=variant.name, run_root=str(root))
    directory = run_directory(config).parent if config.merge.merges else run_directory(config)
    runs = [directory if worker is None else directory / f"worker-{worker}" for worker in variant.members]
    return Job(
        variant=variant.name,
        seed=seed,
        arguments=tuple(train_arguments(variant, plan.base, own)),
        runs=tuple(runs),
        log=plan.out / "logs" / f"{variant.name}-seed-{seed}.log",
        steps=variant.config.steps,
    )


def describe_plan(plan: Plan) -> Iterator[str]:
    """Say in lines what is run, in order."""
    yield f"{len(plan.jobs)} runs of {plan.task}, {plan.budget_s / 60:g} minutes of training each, into {plan.out}"
    for variant in plan.variants:
        workers = f"{variant.workers} workers, " if variant.workers > 1 else ""
        threads = next(text for text in plan.of(variant)[0].arguments if key_of(text) == "threads")
        yield f"  {variant.name:<18} {workers}{threads}  {' '.join(variant.overrides)}"
    for number, job in enumerate(plan.jobs, start=1):
        yield f"{number:>3}. {job}\n     {job.command}"
