"""Saved weights, read from our own format or the published one. A run keeps them with its checkpoints."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tdmpc.agent.official import from_published, is_published

FORMAT = 1
WEIGHTS = "weights.pt"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line for whoever named it."""


def weights_file(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file of weights, for `torch.save`, from `TDMPC2.weights`."""
    return {"format": FORMAT, **weights}


def load_weights(source: str) -> dict[str, Any]:
    """Read what `TDMPC2.weights` gave, from our own file or the published format.

    Args:
        source: a file, a checkpoint folder, or a run directory (its newest checkpoint).

    Raises:
        CheckpointError: nothing there, or not a checkpoint, or one of a kind of model that is not supported.
    """
    path = find_weights(source)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a file that is no checkpoint makes of the unpickler is anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # whose text advises to load it whatever it may run
            reason = "not a file of tensors and numbers alone"
        raise CheckpointError(f"checkpoint={source}: {path} cannot be read as a checkpoint ({reason})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint={source}: {path} holds no checkpoint")
    if _is_ours(content):
        return content
    state = content.get("model", content)
    if not (isinstance(state, dict) and is_published(state)):
        raise CheckpointError(f"checkpoint={source}: {path} is neither of format {FORMAT} nor a published checkpoint")
    try:
        return from_published(state)
    except ValueError as error:
        raise CheckpointError(f"checkpoint={source}: {error}") from None


def _is_ours(content: dict[Any, Any]) -> bool:
    return content.get("format") == FORMAT and {"network", "model", "scale", "lifetime"} <= content.keys()


def find_weights(source: str) -> Path:
    """Return the file of weights that a file, a checkpoint folder or a run directory stands for.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(source)
    if path.is_file():
        return path
    if (path / WEIGHTS).is_file():
        return path / WEIGHTS
    checkpoints = _checkpoints(path)
    if checkpoints:
        return checkpoints[-1] / WEIGHTS
    problem = "holds no checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"checkpoint={source}: {problem}; name a file, a checkpoint folder or a run directory")


def check_sizes(source: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse weights of other sizes than wanted.

    Args:
        source: as given by the user.
        saved: settings of the saved networks.
        wanted: the sizes that they must have, by the same names.

    Raises:
        CheckpointError: naming every size that differs, as saved and as wanted.
    """
    different = [f"{name} {saved[name]} (here {wanted[name]})" for name in wanted if saved[name] != wanted[name]]
    if different:
        raise CheckpointError(f"checkpoint={source}: its sizes are not the agent's: {', '.join(different)}")


def _checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run that are whole, the newest last."""
    folders = [path.parent for path in run.glob(f"checkpoints/*/{WEIGHTS}") if path.parent.name.isdigit()]
    return sorted(folders, key=lambda path: int(path.name))
