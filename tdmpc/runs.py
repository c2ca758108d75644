"""What the scripts do, from a checked configuration to a readable end."""

import sys
from contextlib import ExitStack

from envs import TaskError, check_task
from tdmpc.compose import build_evaluator, build_trainer
from tdmpc.config import EvaluateConfig, TrainConfig, run_directory
from tdmpc.keys import ConfigError, to_yaml
from tdmpc.replay import EmptyReplayError
from tdmpc.telemetry.sinks import Console, EvalCsv, JsonLines
from tdmpc.training.checkpoint import CheckpointError, find_weights, save_weights
from tdmpc.training.run_directory import RunDirectoryError, claim, describe
from tdmpc.training.trainer import Trainer, UnexpectedTerminationError

USER_ERRORS = (
    CheckpointError,
    ConfigError,
    EmptyReplayError,
    RunDirectoryError,
    TaskError,
    UnexpectedTerminationError,
)
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def train(config: TrainConfig) -> None:
    """Train as configured and leave everything in the run directory.

    Ctrl-C saves the weights before it ends the program.
    """
    check_task(config.task, config.env)
    if config.checkpoint is not None:
        find_weights(config.checkpoint)
    with claim(run_directory(config), overwrite=config.overwrite) as run, ExitStack() as stack:
        describe(run, to_yaml(config))
        console = Console(config.steps)
        sinks = [console, JsonLines(run / "metrics.jsonl"), EvalCsv(run / "eval.csv")]
        trainer = build_trainer(config, run, sinks, stack)
        trainer.recorder.announce(f"run directory: {run}")
        try:
            trainer.train()
        except KeyboardInterrupt:
            path = save_weights(run, trainer.progress.steps, trainer.agent.weights())
            trainer.recorder.announce(f"interrupted after {trainer.progress.steps} steps; weights saved to {path}")
            sys.exit(INTERRUPTED)
        _summarise(trainer, str(run), config)


def _summarise(trainer: Trainer, run: str, config: TrainConfig) -> None:
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
