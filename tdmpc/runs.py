"""What the scripts do, from a checked configuration to a readable end."""

from contextlib import ExitStack
from pathlib import Path

from envs import TaskError, check_task
from tdmpc.compose import build_evaluator, build_trainer
from tdmpc.config import EvaluateConfig, TrainConfig, run_directory
from tdmpc.keys import ConfigError, to_yaml
from tdmpc.replay import EmptyReplayError
from tdmpc.telemetry.recorder import Recorder
from tdmpc.telemetry.sinks import Console, EvalCsv, JsonLines
from tdmpc.training.checkpoint import CheckpointError, find_weights, save_weights
from tdmpc.training.run_directory import RunDirectoryError, claim, describe, forget
from tdmpc.training.trainer import Trainer, UnexpectedTerminationError

USER_ERRORS = (
    CheckpointError,
    ConfigError,
    EmptyReplayError,
    RunDirectoryError,
    TaskError,
    UnexpectedTerminationError,
)


def train(config: TrainConfig) -> None:
    """Train as configured and leave everything in the run directory.

    Ctrl-C, or an error, saves the weights before it ends the program.
    """
    check_task(config.task, config.env)
    if config.checkpoint is not None:
        find_weights(config.checkpoint)
    with claim(run_directory(config), overwrite=config.overwrite) as run, ExitStack() as stack:
        recorder = Recorder([Console(config.steps)])
        stack.callback(recorder.close)
        trainer = build_trainer(config, run, recorder, stack)
        # Only now that everything fits together is anything written.
        describe(run, to_yaml(config))
        recorder.add_sink(JsonLines(run / "metrics.jsonl"))
        recorder.add_sink(EvalCsv(run / "eval.csv"))
        recorder.announce(f"run directory: {run}")
        _run(trainer, run, config)
        _summarise(trainer, run, config)


def _run(trainer: Trainer, run: Path, config: TrainConfig) -> None:
    """Train, and keep what was learned whatever ends it."""
    try:
        trainer.train()
    except (EmptyReplayError, UnexpectedTerminationError):
        if trainer.progress.updates == 0:
            forget(run)  # nothing was learned, and the corrected command should not find its directory used
        raise
    except BaseException as error:
        ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "ended by an error"
        kept = (
            f"weights saved to {save_weights(run, trainer.progress.steps, trainer.agent.weights())}"
            if config.save_agent
            else "weights not saved"
        )
        trainer.recorder.announce(f"{ending} after {trainer.progress.steps:,} steps; {kept}")
        raise


def _summarise(trainer: Trainer, run: Path, config: TrainConfig) -> None:
    """Say what the run came to and how to go on."""
    progress, outcome = trainer.progress, trainer.last_evaluation
    assert outcome is not None
    minutes, seconds = divmod(round(trainer.recorder.elapsed_s), 60)
    trainer.recorder.announce(
        f"\ndone: {progress.steps:,} steps, {progress.episodes:,} episodes, {progress.updates:,} updates "
        f"in {minutes} min {seconds} s\n"
        f"return of the last evaluation: {outcome.returns.mean():.1f} over {len(outcome.returns)} episodes\n"
        f"curve and metrics: {run}/eval.csv, {run}/metrics.jsonl\n"
        + (f"evaluate: python scripts/evaluate.py task={config.task} checkpoint={run}" if config.save_agent else "")
    )


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
