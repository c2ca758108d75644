"""What the scripts do, from a checked configuration to a readable end."""

import os
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from envs import TaskError, check_task
from tdmpc.compose import build_evaluator, build_trainer
from tdmpc.config import FIXED, EvaluateConfig, TrainConfig, run_directory
from tdmpc.episodes import check_new_csv, describe_episodes, drawable_envs, filming, write_csv
from tdmpc.group import announce_end
from tdmpc.keys import ConfigError, shown, to_mapping, to_yaml
from tdmpc.merging.exchange import ExchangeError
from tdmpc.replay import EmptyReplayError
from tdmpc.sharing import check_meeting
from tdmpc.telemetry.console import Console, duration
from tdmpc.telemetry.files import EvalCsv, JsonLines
from tdmpc.telemetry.recorder import NonFiniteError, Recorder
from tdmpc.telemetry.report import report, write_summary
from tdmpc.telemetry.trackers import Background, TensorBoard, TrackerError, WandB
from tdmpc.training.checkpoint import load_newest
from tdmpc.training.collector import UnexpectedTerminationError
from tdmpc.training.resume import Origin, changed_keys, find_origin
from tdmpc.training.run_directory import RunDirectoryError, claim, copy_run, describe, forget, is_used, writing
from tdmpc.training.saver import Saver
from tdmpc.training.stopping import StopRequest
from tdmpc.training.trainer import Stopped, Trainer, UnsavedError
from tdmpc.training.weights import CheckpointError

USER_ERRORS = (
    CheckpointError,
    ConfigError,
    EmptyReplayError,
    ExchangeError,
    NonFiniteError,
    RunDirectoryError,
    TaskError,
    TrackerError,
    UnexpectedTerminationError,
    UnsavedError,
)


def train(config: TrainConfig, label: str = "") -> None:
    """Train as configured, going on where the run directory is, and leave everything in it.

    Ctrl-C, SIGTERM and SIGUSR1 save the run where it can continue exactly and end it with the exit code that a shell
    reports of a program that the signal ended; a second Ctrl-C does not wait. An error saves the run too if it can.

    Args:
        config: of the run.
        label: sets its lines apart from those of others on the same console.
    """
    run = run_directory(config)
    _check_run_root(config.run_root, run)
    check_task(config.task, config.env)
    check_meeting(config)
    origin = find_origin(run, config.resume, overwrite=config.overwrite)
    recorder = Recorder([Console(config.steps, plain=config.log.console == "plain", label=label)])
    if origin is not None:
        _announce_changes(origin, config, recorder)
        if origin.run == run and origin.finished_at is not None and origin.finished_at >= config.steps:
            recorder.announce(_already_finished(run, origin.finished_at, config))
            return
    stop = StopRequest()
    with ExitStack() as stack:
        stack.callback(recorder.close)
        trainer = build_trainer(config, run, recorder, stack, should_stop=stop, breaking_off=stop.breaking_off)
        # Only now that everything fits together is anything written, or overwritten.
        stack.enter_context(claim(run))
        if find_origin(run, config.resume, overwrite=config.overwrite) != origin:
            raise RunDirectoryError(f"{run}: another process has used it since this one began; start again")
        positions = _continue(origin, run, trainer) if origin else {}
        stack.callback(trainer.merger.close)
        # Where it ended before its first checkpoint it starts anew, but the others may know it.
        known = origin is not None or (is_used(run) and not config.overwrite)
        trainer.merger.join(trainer.step, resuming=known, overwrite=config.overwrite)
        if origin is None and known:
            recorder.announce(f"{run}: ended before its first checkpoint; starting anew")
        with writing(run):
            if origin is None:
                forget(run)
            describe(run, to_yaml(config))
            _add_sinks(recorder, run, config, positions, trainer.step if origin else None)
        recorder.announce(f"run directory: {run}")
        with stop.listening():
            _run(trainer, run, config, stop)


def _check_run_root(run_root: str, run: Path) -> None:
    """Refuse early where no run can be written.

    Raises:
        ConfigError: what exists of the path to the run directory is no directory, or may not be written to.
    """
    nearest = next(path for path in (run, *run.parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run_root={run_root}: {nearest} is not a directory, so {run} cannot be made in it")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run_root={run_root}: {nearest} may not be written to; choose another directory")


def _announce_changes(origin: Origin, config: TrainConfig, recorder: Recorder) -> None:
    """Say which keys have changed.

    Raises:
        ConfigError: one of them cannot.
    """
    for name, (before, now) in changed_keys(origin.config, to_mapping(config)).items():
        if name in FIXED:
            raise ConfigError(
                f"{name}={shown(now)}: {origin.run} was started with {shown(before)}, and this cannot change; "
                "choose another exp_name, or overwrite=true to start anew"
            )
        if name not in ("resume", "overwrite", "exp_name", "run_root"):
            recorder.announce(f"changed: {name}={shown(now)} (was {shown(before)})")


def _already_finished(run: Path, step: int, config: TrainConfig) -> str:
    return (
        f"{run}: finished at step {step:,}. To go on, raise steps; to start anew, set overwrite=true or another "
        f"exp_name; to evaluate it, {_evaluate_command(run, config)}"
    )


def _continue(origin: Origin, run: Path, trainer: Trainer) -> dict[str, int]:
    """Bring a trainer to the newest checkpoint that is whole; return how far the files of rows were then.

    Raises:
        CheckpointError: there is none.
    """
    announce, saver, positions = trainer.recorder.announce, trainer.saver, {}
    if not isinstance(saver, Saver):
        raise ConfigError(f"save_agent=false: cannot continue {origin.run} without saving on")

    def use(step: int, content: dict[str, Any]) -> None:
        saver.restore(trainer, step, content)
        positions.update(content["trainer.pt"]["recorder"]["positions"])

    if origin.run != run:
        with writing(run):
            copy_run(origin.run, run)
    step = load_newest(saver.checkpoints, use, announce)
    announce(f"continuing {origin.run} from step {step:,}")
    return positions


def _add_sinks(
    recorder: Recorder, run: Path, config: TrainConfig, positions: dict[str, int], resume_step: int | None
) -> None:
    recorder.add_sink(JsonLines(run / "metrics.jsonl", positions.get("JsonLines")))
    recorder.add_sink(EvalCsv(run / "eval.csv", positions.get("EvalCsv")))
    if config.log.tensorboard:
        recorder.add_sink(Background(TensorBoard(run / "tensorboard", resume_step)))
    if config.enable_wandb:
        recorder.add_sink(Background(_wandb(run, config)))


def _wandb(run: Path, config: TrainConfig) -> WandB:
    return WandB(
        run,
        project=config.wandb_project,
        group="-".join(run.parts[-3:-1]),
        name=run.parts[-1],
        config=asdict(config),
        entity=config.wandb_entity,
        silent=config.wandb_silent,
    )


def _run(trainer: Trainer, run: Path, config: TrainConfig, stop: StopRequest) -> None:
    """Train; whatever ends it, keep what was learned and say what the run, and its group, came to."""
    try:
        _train(trainer, run, config, stop)
    finally:
        trainer.merger.close()
        announce_end(config, run, trainer.recorder.announce)


def _train(trainer: Trainer, run: Path, config: TrainConfig, stop: StopRequest) -> None:
    announce = trainer.recorder.announce
    try:
        trainer.train()
    except Stopped:
        _report(trainer, run, "stopped")
        name = stop.signal.name if stop.signal else "request"
        announce(f"stopped by {name} after {trainer.step:,} steps; {_continuation(trainer, config)}")
        raise SystemExit(stop.exit_code) from None
    except (EmptyReplayError, UnexpectedTerminationError):
        if trainer.progress.total.updates == 0:
            forget(run)  # nothing was learned, and the corrected command should not find its directory used
            raise
        _report(trainer, run, "error")
        raise
    except ExchangeError:
        trainer.save()
        _report(trainer, run, "error")
        announce(f"ended after {trainer.step:,} steps; {_continuation(trainer, config)}")
        raise
    except BaseException as error:
        _report(trainer, run, "interrupted" if isinstance(error, KeyboardInterrupt) else "error")
        announce(f"ended after {trainer.step:,} steps; {_continuation(trainer, config)}")
        raise
    _report(trainer, run, "finished")
    announce(_farewell(trainer, run, config))


def _continuation(trainer: Trainer, config: TrainConfig) -> str:
    """Say how a run that has not finished goes on, and from where if that is not where it is."""
    saver = trainer.saver
    if not isinstance(saver, Saver):
        return "nothing is saved with save_agent=false"
    steps = saver.checkpoints.steps()
    if not steps:
        return "there is no checkpoint to continue from"
    command = "the same command without overwrite=true" if config.overwrite else "the same command"
    return f"{command} continues" if steps[-1] == trainer.step else f"{command} continues from step {steps[-1]:,}"


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
    try:
        write_summary(run / "summary.json", total, summary)
    except OSError as error:
        trainer.recorder.announce(f"warning: {run / 'summary.json'} not written ({error})")


def _farewell(trainer: Trainer, run: Path, config: TrainConfig) -> str:
    """Say what the run came to and how to go on."""
    view, outcome = trainer.progress.view(), trainer.last_evaluation
    assert outcome is not None
    counts = view.total
    lines = [
        f"\ndone: {counts.steps:,} steps, {counts.episodes:,} episodes, {counts.updates:,} updates"
        f"{f', {counts.merges:,} merges' if config.merge.merges else ''} in {duration(view.total_elapsed_s)}",
        f"return of the last evaluation: {outcome.returns.mean():.1f} over {len(outcome.returns)} episodes",
        f"files: {run}",
        f"pictures: python scripts/plot.py {run}",
    ]
    if config.save_agent and counts.updates:
        lines.append(f"evaluate: {_evaluate_command(run, config)}")
    return "\n".join(lines)


def _evaluate_command(run: Path, config: TrainConfig) -> str:
    """Return the command that evaluates a run with everything that makes the agent act as it did there."""
    left_out = ("checkpoint", "eval_episodes", "num_envs", "env", "seed", "csv", "save_video", "video_dir")
    names = [f.name for f in fields(EvaluateConfig) if f.name not in left_out]
    default = TrainConfig()
    changed = [name for name in names if name == "task" or getattr(config, name) != getattr(default, name)]
    options = [f"env.{name}={shown(value)}" for name, value in config.env.items()]
    keys = (f"{name}={shown(getattr(config, name))}" for name in changed)
    return " ".join(["python scripts/evaluate.py", f"checkpoint={run}", *keys, *options])


def evaluate(config: EvaluateConfig) -> None:
    """Evaluate saved weights; print the return of every episode, the mean with its interval, the standard deviation."""
    check_task(config.task, config.env)
    check_new_csv(config.csv)
    with ExitStack() as stack:
        drawable = drawable_envs(config, stack)
        evaluator = build_evaluator(config, stack)
        if drawable is not None:
            evaluator.envs = drawable
        lifetime = evaluator.agent.lifetime
        print(f"{config.checkpoint}: weights of {lifetime.steps:,} steps and {lifetime.updates:,} updates")
        with filming(drawable, config.video_dir, lifetime.steps).film(lifetime.steps) as take_picture:
            outcome = evaluator.evaluate(config.eval_episodes, 0, take_picture)
    print("\n".join(describe_episodes(outcome)))
    if config.csv is not None:
        write_csv(config.csv, outcome, evaluator.seeds, round=0)
        print(f"wrote {config.csv}")
