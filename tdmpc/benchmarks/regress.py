"""The suite `regress`: a fixed set of runs whose curves and speeds are compared with a stored reference.

The runs are the same to the last bit wherever the code computes the same, so a curve that differs at all says that
something has changed, and one that falls below the band that it may have got worse.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from tdmpc.benchmarks.machine import cores
from tdmpc.benchmarks.plan import Job, Plan, make_job
from tdmpc.benchmarks.processes import TrainProcess
from tdmpc.benchmarks.reference import Reference, measure, print_comparison
from tdmpc.benchmarks.runner import Interrupted, RunFailed, Runner
from tdmpc.benchmarks.suite_bar import SuiteBar
from tdmpc.benchmarks.suites import RegressConfig
from tdmpc.benchmarks.variants import read_variant
from tdmpc.benchmarks.wallclock import claimed, describe_plan_machine
from tdmpc.telemetry.console import duration
from tdmpc.telemetry.history import read_rows
from tdmpc.training.stopping import StopRequest

TASKS = ("cartpole-swingup", "cup-catch")
SEED = 1
SETTINGS = (
    *("model_size=1", "num_envs=4", "steps_per_update=2", "steps=4000", "seed_steps=1000", "compile=false"),
    *("iterations=4", "num_samples=256", "num_elites=32", "num_pi_trajs=16"),
    *("eval_freq=2000", "eval_episodes=3", "log_freq=200", "log.console=plain", "log.tensorboard=false"),
)
"""Keys of train.py in both runs; not compiled, since compilers differ more than what they compile."""

FAILED = 1
ASSUMED_RUN_S = 240.0  # charged seconds on two cores
ASSUMED_WALL_S = 600.0  # of both runs, evaluations and saving included


def run(config: RegressConfig, base: Sequence[str] = (), new_runner: Callable[..., Runner] | None = None) -> None:
    """Run the set, and compare it with the reference or make it the reference.

    Args:
        config: of the suite.
        base: nothing; the set is fixed.
        new_runner: makes what carries out jobs; None for one that starts processes.

    Raises:
        ConfigError: there is no reference, or it cannot be read.
        SystemExit: something is worse or failed (code 1), or a signal has stopped it.
    """
    plans = [_plan(config, task) for task in TASKS]
    jobs = {plan.task: plan.jobs[0] for plan in plans}
    if config.dry:
        print("\n".join([*(job.command for job in jobs.values()), f"about {duration(ASSUMED_WALL_S)} on two cores"]))
        return
    reference = None if config.update_reference else Reference.read(Path(config.reference))
    with claimed(Path(config.out)):
        machine = describe_plan_machine(plans[0])
        new_runner = new_runner or partial(Runner, partial(TrainProcess, threads=plans[0].threads), math.inf)
        _run_all(jobs, new_runner)
    now = Reference(machine, SETTINGS, {task: measure(read_rows(_metrics(job))) for task, job in jobs.items()})
    if reference is None:
        now.write(Path(config.reference))
        print(f"wrote {config.reference}")
    elif not print_comparison(reference, now, slower=config.slower, band=config.band):
        raise SystemExit(FAILED)


def _plan(config: RegressConfig, task: str) -> Plan:
    variant = read_variant("regress=[]", [*SETTINGS, f"task={task}"])
    plan = Plan((variant,), (), SETTINGS, task, math.inf, config.threads or cores(), Path(config.out))
    job = make_job(plan, variant, SEED, overwrite="true")
    return replace(plan, jobs=(replace(job, log=plan.out / "logs" / f"{task}.log"),))


def _run_all(jobs: Mapping[str, Job], new_runner: Callable[..., Runner]) -> None:
    stop = StopRequest()
    with closing(SuiteBar(ASSUMED_RUN_S * len(jobs), 0.0, sys.stdout)) as bar, stop.listening():
        for number, (task, job) in enumerate(jobs.items()):
            bar.say(f"{number + 1}/{len(jobs)} {task}")
            begin = ASSUMED_RUN_S * number

            def advance(_: Job, charged_s: float, begin: float = begin) -> None:
                bar.advance(begin + min(charged_s, ASSUMED_RUN_S))

            try:
                new_runner(should_stop=stop, on_progress=advance).run(job)
            except RunFailed as error:
                bar.say(f"FAILED: {error}")
                raise SystemExit(FAILED) from None
            except Interrupted:
                raise SystemExit(stop.exit_code) from None


def _metrics(job: Job) -> Path:
    return job.runs[0] / "metrics.jsonl"
