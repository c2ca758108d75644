"""Checkpoints from which a run continues exactly: written whole or not at all, never modified.

A run keeps them as::

    <run directory>/checkpoints/
        latest                  the step of the newest one; moves last
        <step>/
            manifest.json       format, step, size and SHA-256 of every other file
            weights.pt          what was learned; all that evaluation and a new run need
            learner.pt          optimisers and the random stream of updates
            trainer.pt          environments, schedules, progress, telemetry
            replay.json         which rows of which segments the replay holds
            config.json         every key, resolved
        <step>.old/             the one that is being replaced by another of the same step; counts until that is there
        <step>.broken/          one that could not be loaded; for whoever wants to know why
    <run directory>/replay/     the segments, shared by the checkpoints
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tdmpc.training.weights import CheckpointError

FORMAT = 1
MANIFEST, CONFIG, LATEST = "manifest.json", "config.json", "latest"
PART, OLD, BROKEN = ".part", ".old", ".broken"

State = Mapping[str, Any]
"""What a checkpoint holds: content by file name, tensors and plain types (`.pt`) or JSON (`.json`)."""


class Checkpoints:
    """The checkpoints of a run directory.

    Args:
        run: the directory.
        keep: how many of the newest ones stay.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.folder, self.keep = run / "checkpoints", keep

    def save(self, step: int, state: State) -> int:
        """Write the checkpoint of a step and return its size in bytes.

        It is written under another name on the same file system and renamed when it is complete and on disk, so a
        kill at any moment leaves it whole or not there at all. One of the same step is replaced.

        Raises:
            OSError: it cannot be written; the others are as they were.
        """
        part = self.folder / f"{step}{PART}"
        self._remove_rest()
        try:
            part.mkdir(parents=True)
            size = _write(part, step, state)
            final = self.folder / str(step)
            if final.exists():
                final.rename(self.folder / f"{step}{OLD if _is_complete(final) else PART}")
            part.rename(final)
            sync(self.folder)
            replace_text(self.folder / LATEST, str(step))
        finally:
            self._remove_rest()
        return size

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that are complete, the newest last."""
        names = {path.parent.name.removesuffix(OLD) for path in self.folder.glob(f"*/{MANIFEST}")}
        return sorted(int(name) for name in names if name.isdigit())

    def prune(self) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[: -self.keep]:
            doomed = self.folder / f"{step}{PART}"
            self.folder_of(step).rename(doomed)  # at once incomplete for whoever looks
            shutil.rmtree(doomed)

    def folder_of(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        final = self.folder / str(step)
        return final if _is_complete(final) else final.with_suffix(OLD)

    def set_aside(self, step: int) -> Path:
        """Let a checkpoint count no longer, neither to continue from nor as one to keep; return where it is."""
        aside = self.folder / f"{step}{BROKEN}"
        if aside.exists():
            shutil.rmtree(aside)
        return self.folder_of(step).rename(aside)

    def load(self, step: int) -> dict[str, Any]:
        """Read a checkpoint and return its content by file name.

        Raises:
            CheckpointError: a file is missing, of another size or checksum, or cannot be read.
        """
        folder = self.folder_of(step)
        return {name: _read(folder / name, *expected) for name, expected in _manifest(folder).items()}

    def read_json(self, name: str) -> list[Any]:
        """Return a JSON file of every checkpoint that has it undamaged."""
        contents = []
        for step in self.steps():
            with contextlib.suppress(OSError, ValueError):
                contents.append(json.loads((self.folder_of(step) / name).read_text(encoding="utf-8")))
        return contents

    def _remove_rest(self) -> None:
        replaced = [path for path in self.folder.glob(f"*{OLD}") if _is_complete(path.with_suffix(""))]
        for path in [*self.folder.glob(f"*{PART}"), *replaced]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def load_newest(
    checkpoints: Checkpoints, use: Callable[[int, dict[str, Any]], None], warn: Callable[[str], None]
) -> int | None:
    """Load the newest checkpoint that is whole, falling back to the ones before, loudly; broken ones are set aside.

    Args:
        checkpoints: of the run.
        use: called with step and content; a CheckpointError from it counts as a broken checkpoint too.
        warn: told of every broken one, by name.

    Returns:
        The step of the one that was used; None where there is no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints and none of them is whole.
    """
    steps, broken = checkpoints.steps(), []
    for step in reversed(steps):
        try:
            use(step, checkpoints.load(step))
        except CheckpointError as error:
            warn(f"warning: checkpoint {checkpoints.folder / str(step)} is broken ({error}); trying the one before")
            broken.append(step)
        else:
            for other in broken:  # only now that the run goes on without them
                warn(f"the broken checkpoint is kept as {checkpoints.set_aside(other)}")
            return step
    if steps:
        raise CheckpointError(
            f"none of the checkpoints in {checkpoints.folder} is whole; start anew with overwrite=true"
        )
    return None


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(folder: Path, step: int, state: State) -> int:
    """Write all files of a checkpoint, the manifest last, and return their size in bytes."""
    files = {}
    for name, content in state.items():
        path = folder / name
        if path.suffix == ".json":
            path.write_text(json.dumps(content), encoding="utf-8")
        else:
            _write_tensors(path, content)
        sync(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)
    return sum(file["bytes"] for file in files.values())


def _write_tensors(path: Path, content: Any) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(f"{path.name}: cannot be written; {str(error).splitlines()[0]}") from error


def _is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


def _manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size in bytes and SHA-256 of every file."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
        expected = {name: (file["bytes"], file["sha256"]) for name, file in files.items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{MANIFEST} is not what was written") from None
    if version != FORMAT:
        raise CheckpointError(f"{MANIFEST} is of format {version}, not {FORMAT}")
    return expected


def _read(path: Path, size: int, digest: str) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is missing")
    if path.stat().st_size != size or _digest(path) != digest:
        raise CheckpointError(f"{path.name} is not what was written")
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return torch.load(path, map_location="cpu", weights_only=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Give a file another content at one moment: whoever is killed leaves the old one or the new one."""
    part = path.with_suffix(PART)
    part.write_text(text, encoding="utf-8")
    sync(part)
    part.replace(path)
    sync(path.parent)
