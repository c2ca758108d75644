"""Whether a command continues a run, and which of its keys may differ from before."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tdmpc.training.checkpoint import Checkpoints
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
    if resume not in ("auto", "never"):
        refuse_used(run, overwrite=overwrite)
        if not Checkpoints(Path(resume), keep=1).steps():
            raise RunDirectoryError(f"resume={resume}: holds no checkpoint; must be auto, never or a run directory")
        return _origin(Path(resume))
    if overwrite:
        return None
    if resume == "auto" and Checkpoints(run, keep=1).steps():
        return _origin(run)
    if resume == "auto" and _saves(run):
        return None  # it ended before its first checkpoint, and the same command makes the same run
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


def _saves(run: Path) -> bool:
    """Tell whether the run in a directory was to have checkpoints."""
    path = run / "config.yaml"
    return path.exists() and bool(_read_config(path).get("save_agent"))


def _read_config(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _origin(run: Path) -> Origin:
    return Origin(run, _read_config(run / "config.yaml"), _finished_at(run / "summary.json"))


def _finished_at(summary: Path) -> int | None:
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content["counts"]["steps"] if content["ending"] == "finished" else None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name != "env":
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
