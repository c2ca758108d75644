"""What the scripts do, from a checked configuration to a readable end."""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType

from envs import TaskError, check_task
from tdmpc.compose import build_evaluator, build_trainer
from tdmpc.config import EvaluateConfig, TrainConfig, run_directory
from tdmpc.keys import ConfigError, shown, to_yaml
from tdmpc.replay import EmptyReplayError
from tdmpc.telemetry.console import Console, duration
from tdmpc.telemetry.files import EvalCsv, JsonLines
from tdmpc.telemetry.recorder import NonFiniteError, Recorder
from tdmpc.telemetry.report import report, write_summary
from tdmpc.telemetry.trackers import Background, TensorBoard, TrackerError, WandB
from tdmpc.training.checkpoint import CheckpointError
from tdmpc.training.collector import UnexpectedTerminationError
from tdmpc.training.run_directory import RunDirectoryError, claim, describe, forget, refuse_used
from tdmpc.training.trainer import Trainer

USER_ERRORS = (
    CheckpointError,
    ConfigError,
    EmptyReplayError,
    NonFiniteError,
    RunDirectoryError,
    TaskError,
    TrackerError,
    UnexpectedTerminationError,
)


class Terminated(SystemExit):
    """SIGTERM has arrived; the exit code is the one that a shell reports of a program that it ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def train(config: TrainConfig) -> None:
    """Train as configured and leave everything in the run directory.

    Whatever ends the run, Ctrl-C, SIGTERM or an error, the weights are saved and a report is given before.
    """
    run = run_directory(config)
    check_task(config.task, config.env)
    refuse_used(run, overwrite=config.overwrite)
    recorder = Recorder([Console(config.steps, plain=config.log.console == "plain")])
    with ExitStack() as stack:
        stack.callback(recorder.close)
        trainer = build_trainer(config, run, recorder, stack)
        # Only now that everything fits together is anything written, or overwritten.
        stack.enter_context(claim(run, overwrite=config.overwrite))
        describe(run, to_yaml(config))
        _add_sinks(recorder, run, config)
        recorder.announce(f"run directory: {run}")
        with _sigterm_raises():
            _run(trainer, run, config)


def _add_sinks(recorder: Recorder, run: Path, config: TrainConfig) -> None:
    recorder.add_sink(JsonLines(run / "metrics.jsonl"))
    recorder.add_sink(EvalCsv(run / "eval.csv"))
    if config.log.tensorboard:
        recorder.add_sink(Background(TensorBoard(run / "tensorboard")))
    if config.enable_wandb:
        group, name = "-".join(run.parts[-3:-1]), run.parts[-1]
        tracker = WandB(
            run,
            project=config.wandb_project,
            group=group,
            name=name,
            config=asdict(config),
            entity=config.wandb_entity,
            silent=config.wandb_silent,
        )
        recorder.add_sink(Background(tracker))


def _run(trainer: Trainer, run: Path, config: TrainConfig) -> None:
    """Train; whatever ends it, keep what was learned and say what the run came to."""
    announce = trainer.recorder.announce
    try:
        trainer.train()
    except (EmptyReplayError, UnexpectedTerminationError):
        if trainer.progress.total.updates == 0:
            forget(run)  # nothing was learned, and the corrected command should not find its directory used
            raise
        announce(f"stopped after {trainer.step:,} steps; {_try_to_save(trainer)}")
        _report(trainer, run, "error")
        raise
    except NonFiniteError:
        _report(trainer, run, "error")  # these weights must not replace the last checkpoint
        raise
    except BaseException as error:
        ending = "interrupted" if isinstance(error, KeyboardInterrupt | Terminated) else "error"
        announce(f"stopped after {trainer.step:,} steps; {_try_to_save(trainer)}")
        _report(trainer, run, ending)
        raise
    _report(trainer, run, "finished")
    announce(_farewell(trainer, run, config))


def _try_to_save(trainer: Trainer) -> str:
    """Save the weights and say so; a failure is said too, and hides nothing that is about to be raised."""
    try:
        return str(trainer.save(trainer.step))
    except Exception as error:
        return f"weights not saved ({type(error).__name__}: {error})"


def _report(trainer: Trainer, run: Path, ending: str) -> None:
    """Print where the time went and write `summary.json`."""
    view, total, evaluation = trainer.progress.view(), trainer.timers.total(), trainer.last_evaluation
    summary = {
        "ending": ending,
        "counts": asdict(view.total),
        "elapsed_s": {phase.value: seconds for phase, seconds in view.elapsed_s.items()},
        "lifetime": asdict(trainer.agent.lifetime),
        "last_evaluation": None if evaluation is None else evaluation.metrics(),
    }
    trainer.recorder.announce(f"\n{report(total, trainer.timers.overhead_s)}")
    write_summary(run / "summary.json", total, summary)


def _farewell(trainer: Trainer, run: Path, config: TrainConfig) -> str:
    """Say what the run came to and how to go on."""
    view, outcome = trainer.progress.view(), trainer.last_evaluation
    assert outcome is not None
    counts = view.total
    lines = [
        f"\ndone: {counts.steps:,} steps, {counts.episodes:,} episodes, {counts.updates:,} updates "
        f"in {duration(view.total_elapsed_s)}",
        f"return of the last evaluation: {outcome.returns.mean():.1f} over {len(outcome.returns)} episodes",
        f"files: {run}",
        f"pictures: python scripts/plot.py {run}",
    ]
    if config.save_agent and counts.updates:
        lines.append(f"evaluate: python scripts/evaluate.py checkpoint={run} {_evaluation_keys(config)}")
    return "\n".join(lines)


def _evaluation_keys(config: TrainConfig) -> str:
    """Return the keys of `evaluate.py` that make it act as this run did."""
    left_out = ("checkpoint", "eval_episodes", "num_envs", "env", "seed")
    names = [f.name for f in fields(EvaluateConfig) if f.name not in left_out]
    default = TrainConfig()
    changed = [name for name in names if name == "task" or getattr(config, name) != getattr(default, name)]
    options = [f"env.{name}={shown(value)}" for name, value in config.env.items()]
    return " ".join([*(f"{name}={shown(getattr(config, name))}" for name in changed), *options])


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the run as Ctrl-C does, instead of ending it on the spot."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def evaluate(config: EvaluateConfig) -> None:
    """Evaluate saved weights and print the return of every episode, mean and standard deviation."""
    check_task(config.task, config.env)
    with ExitStack() as stack:
        evaluator = build_evaluator(config, stack)
        lifetime = evaluator.agent.lifetime
        print(f"{config.checkpoint}: weights of {lifetime.steps:,} steps and {lifetime.updates:,} updates")
        outcome = evaluator.evaluate(config.eval_episodes, round=0)
    for number, (value, length) in enumerate(zip(outcome.returns, outcome.lengths, strict=True)):
        print(f"episode {number:>3}  return {value:>9.2f}  steps {length}")
    print(f"mean {outcome.returns.mean():.2f}  std {outcome.returns.std():.2f}  episodes {len(outcome.returns)}")
