"""The directory of a run: who has it, and what made it.

A run writes::

    <run_root>/<task>/<exp_name>/seed-<seed>[/worker-<i>]/
        config.yaml       every key, resolved
        provenance.json   command, git commit, versions, machine
        git.diff          what differed from the commit, where anything did
        metrics.jsonl     one row a window and an evaluation
        eval.csv          step,episode_reward
        summary.json      counts, times, last evaluation; written when the run ends
        trace.json        with profile.trace=true
        checkpoints/      see checkpoint.py
        replay/           see replay_segments.py
        tensorboard/      event files
        videos/           with save_video=true, one of every evaluation
        wandb/, wandb_id  with enable_wandb=true
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from tdmpc.training.checkpoint import replace_text

_REPOSITORY = Path(__file__).parents[2]
_HOLDER = ".holder"
_WRITTEN = (
    *("config.yaml", "provenance.json", "git.diff", "metrics.jsonl", "eval.csv", "summary.json", "trace.json"),
    # What a kill in the middle of a replacement leaves.
    *("config.part", "metrics.jsonl.tmp", "eval.csv.tmp", "summary.part", "checkpoints.part"),
    *("checkpoints", "replay", "tensorboard", "videos", "wandb", "wandb_id"),
)


class RunDirectoryError(ValueError):
    """A run directory that cannot be used; the message is one line for whoever started the run."""


def is_used(run: Path) -> bool:
    """Tell whether a directory holds a run."""
    return bool(_written(run))


def refuse_used(run: Path, *, overwrite: bool) -> None:
    """Refuse a directory that holds a run, unless that run is to be replaced.

    Raises:
        RunDirectoryError: it does, and `overwrite` is false.
    """
    if is_used(run) and not overwrite:
        raise RunDirectoryError(f"{run}: holds a run; choose another exp_name or seed, or overwrite=true to replace it")


@contextmanager
def claim(run: Path) -> Iterator[None]:
    """Hold the directory `run` for this process; it is made where it does not exist.

    Raises:
        RunDirectoryError: another process holds it, or it cannot be written to.
    """
    with _locked(run):
        (run / _HOLDER).write_text(f"process {os.getpid()} on {platform.node()}")
        yield


def _locked(run: Path) -> AcquireReturnProxy:
    try:
        run.mkdir(parents=True, exist_ok=True)
        return FileLock(run / ".lock").acquire(timeout=0)
    except Timeout:
        raise RunDirectoryError(
            f"{run}: another process writes this run ({_holder(run)}); choose another exp_name or seed"
        ) from None
    except OSError as error:
        raise _unwritable(run, error) from None


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Bracket what is written into a run directory before the run begins.

    Raises:
        RunDirectoryError: instead of an error of the system, as of a full disk.
    """
    try:
        yield
    except OSError as error:
        raise _unwritable(run, error) from None


def _unwritable(run: Path, error: OSError) -> RunDirectoryError:
    where = f": {error.filename}" if error.filename else ""
    return RunDirectoryError(f"{run}: cannot be written to ({error.strerror or error}{where})")


def _holder(run: Path) -> str:
    try:
        return (run / _HOLDER).read_text()
    except OSError:
        return "which has not said its number"


def forget(run: Path) -> None:
    """Delete what a run wrote into its directory; other files stay."""
    for path in _written(run):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _written(run: Path) -> list[Path]:
    return [path for path in (run / name for name in _WRITTEN) if path.exists()]


def copy_run(source: Path, run: Path) -> None:
    """Copy what a run continues from into another, empty directory: its replay rows and curves, then checkpoints.

    There is no checkpoint until all is there, so what a kill leaves is not continued.
    """
    forget(run)
    for name in ("metrics.jsonl", "eval.csv"):
        if (source / name).exists():
            shutil.copy2(source / name, run / name)
    if (source / "replay").exists():
        shutil.copytree(source / "replay", run / "replay")
    part = run / "checkpoints.part"
    shutil.copytree(source / "checkpoints", part)
    part.rename(run / "checkpoints")


def describe(run: Path, config: str) -> None:
    """Write down what the run is made from: its configuration (YAML), the code and the machine."""
    replace_text(run / "config.yaml", config)
    provenance = {
        "command": sys.argv,
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {dist.metadata["Name"]: dist.version for dist in distributions()},
    }
    (run / "provenance.json").write_text(json.dumps(provenance, indent=2))
    diff = _git("diff", "HEAD")
    if diff:
        (run / "git.diff").write_text(diff, encoding="utf-8")


def _git(*arguments: str) -> str:
    """Return what git says about the code, nothing where there is no git or no repository."""
    try:
        command = ["git", "-C", str(_REPOSITORY), *arguments]
        # What differs may be a file in any encoding.
        return subprocess.run(command, capture_output=True, check=True).stdout.decode(errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return ""
