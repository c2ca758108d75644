"""Whether a command continues a run, and which of its keys may differ from before."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tdmpc.training.checkpoint import CONFIG, Checkpoints
from tdmpc.training.run_directory import RunDirectoryError, refuse_used


@dataclass(frozen=True)
class Origin:
    """Where a run goes on from.

    Attributes:
        run: the run directory whose checkpoints are read.
        config: the keys it was started with, as they were written down.
        finished_at: the step at which it finished; None where it did not.
    """

    run: Path
    config: Mapping[str, Any]
    finished_at: int | None


def find_origin(run: Path, resume: str, *, overwrite: bool) -> Origin | None:
    """Return what a command continues; None where it starts anew.

    Args:
        run: its own run directory.
        resume: `auto`, `never`, or another run directory.
        overwrite: whether a run in its own directory is given up.

    Raises:
        RunDirectoryError: its directory is used and not to be continued, or there is nothing to continue.
    """
    names_a_run = resume not in ("auto", "never")
    if names_a_run and not _is_own(run, resume, overwrite=overwrite):
        refuse_used(run, overwrite=overwrite)
        if not Checkpoints(Path(resume), keep=1).steps():
            raise RunDirectoryError(f"resume={resume}: holds no checkpoint; must be auto, never or a run directory")
        return _origin(Path(resume))
    if overwrite and not names_a_run:
        return None
    if resume != "never" and Checkpoints(run, keep=1).steps():
        return _origin(run)
    if resume == "auto" and _ended_early(run):
        return None  # the same command makes the same run
    refuse_used(run, overwrite=False)
    return None


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys, dotted, whose values differ, with the value before and now; keys new since then are left out."""
    flat_before, flat_now = _flat(before), _flat(now)
    return {
        name: (flat_before[name], flat_now[name])
        for name in flat_now
        if name in flat_before and flat_before[name] != flat_now[name]
    }


def _is_own(run: Path, resume: str, *, overwrite: bool) -> bool:
    """Tell whether `resume` is the run itself, however it is written, or has been copied into it already."""
    copied = not overwrite and _described(run).get("resume") == resume
    return copied or Path(resume).resolve() == run.resolve()


def _ended_early(run: Path) -> bool:
    """Tell whether a run that was to have checkpoints ended before the first; else they have been removed."""
    return bool(_described(run).get("save_agent")) and _summary(run).get("ending") not in ("finished", "stopped")


def _origin(run: Path) -> Origin:
    # Runs of before had no configuration in their checkpoints.
    config = (Checkpoints(run, keep=1).read_json(CONFIG) or [None])[-1] or _described(run)
    if not config:
        raise RunDirectoryError(f"{run}: neither its checkpoints nor config.yaml say what it was started with")
    return Origin(run, config, _finished_at(_summary(run)))


def _finished_at(summary: Mapping[str, Any]) -> int | None:
    try:
        return summary["counts"]["steps"] if summary["ending"] == "finished" else None
    except (KeyError, TypeError):
        return None


def _described(run: Path) -> dict[str, Any]:
    """Return the keys that a run directory was last written with; none where that cannot be read."""
    return _mapping(run / "config.yaml", yaml.safe_load)


def _summary(run: Path) -> dict[str, Any]:
    return _mapping(run / "summary.json", json.loads)


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name != "env":
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
