"""When a run is saved, and what of it."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tdmpc.training.checkpoint import CONFIG, Checkpoints
from tdmpc.training.schedule import Every
from tdmpc.training.weights import CheckpointError, weights_file

if TYPE_CHECKING:
    from tdmpc.training.trainer import Trainer


class ReplayStore(Protocol):
    """Keeps the rows of the replay, each written once, outside the checkpoints that share them."""

    def save(self) -> tuple[dict[str, Any], int]:
        """Write the rows added since the last call; return what finds them all again, and the bytes written."""
        ...

    def restore(self, index: dict[str, Any]) -> None:
        """Fill the replay with the rows of an index."""
        ...

    def prune(self, keep: list[dict[str, Any]]) -> None:
        """Delete what no index to keep needs."""
        ...


class Saver:
    """Save a run from time to time, and continue it.

    Args:
        checkpoints: of the run.
        replay: its replay rows.
        config: its keys, ready for JSON.
        save_freq: steps between checkpoints; None: only by the clock.
        save_minutes: minutes between checkpoints.
        announce: told of failures.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        replay: ReplayStore,
        config: Mapping[str, Any],
        save_freq: int | None,
        save_minutes: float,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpoints, self.replay, self.config, self.announce = checkpoints, replay, config, announce
        self._every = Every(save_freq, start=save_freq) if save_freq else None
        self._interval_s, self._clock = 60 * save_minutes, clock
        self._last_s = clock()

    def due(self, step: int) -> bool:
        """Tell whether it is time to save."""
        return (self._every is not None and self._every(step)) or self._clock() - self._last_s >= self._interval_s

    def save(self, trainer: "Trainer") -> bool:
        """Write a checkpoint, then drop the oldest; tell whether it was written.

        Where it cannot be, because the disk is full, the last good one stays, and it is tried again when next due.
        """
        self._last_s = self._clock()
        try:
            index, replay_bytes = self.replay.save()
            state = {
                "weights.pt": weights_file(trainer.agent.weights()),
                "learner.pt": trainer.agent.state_dict(),
                "trainer.pt": trainer.state_dict(),
                "replay.json": index,
                CONFIG: self.config,
            }
            size = self.checkpoints.save(trainer.step, state) + replay_bytes
        except OSError as error:
            self.announce(f"warning: checkpoint of step {trainer.step} not written ({error}); the one before stays")
            return False
        trainer.recorder.record("save/bytes", size)
        self.checkpoints.prune()
        self.replay.prune(self.checkpoints.read_json("replay.json"))
        return True

    def restore(self, trainer: "Trainer", step: int, content: dict[str, Any]) -> None:
        """Bring a trainer that was just built to the state of a checkpoint.

        Raises:
            CheckpointError: its replay rows are damaged, or it lacks a file.
        """
        for name in ("weights.pt", "learner.pt", "trainer.pt", "replay.json"):
            if name not in content:
                raise CheckpointError(f"{name} is not in the manifest")
        try:
            self.replay.restore(content["replay.json"])
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        trainer.agent.load_weights(content["weights.pt"])
        trainer.agent.load_state_dict(content["learner.pt"])
        trainer.load_state_dict(content["trainer.pt"])
        if self._every is not None:
            self._every.last = step


class NoSaver:
    """Save nothing."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, trainer: "Trainer") -> bool:
        """Do nothing, and nothing is missing."""
        return True
