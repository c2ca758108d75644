"""Environments in the calling process, one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs.rendering import draw
from envs.slot import Slot


class InProcess:
    """The counterpart of `Children` without processes."""

    def __init__(self, slots: Sequence[Callable[[], Slot]]) -> None:
        self._envs = SyncVectorEnv(slots, autoreset_mode=AutoresetMode.DISABLED)
        self._action = np.empty(0)

    def reset(self, mask: np.ndarray, seeds: list[int | None]) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes where `mask` `[E]` is set; return observations `[E, O]` and info."""
        return self._envs.reset(seed=seeds, options={"reset_mask": mask})

    def send(self, action: np.ndarray) -> None:
        """Keep the actions `[E, A]` for `receive`."""
        self._action = action

    def receive(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Take the steps; return observations `[E, O]`, rewards `[E]` and info."""
        obs, reward, _, _, info = self._envs.step(self._action)
        return obs, reward, info

    def render(self, env: int) -> np.ndarray:
        """Return a picture of an environment `[H, W, 3]` uint8.

        Raises:
            RenderError: If it cannot be drawn.
        """
        return draw(self._envs.envs[env])

    def check_alive(self) -> None:
        """Do nothing: this process is alive."""

    def close(self, patience_s: float) -> None:
        """Close the environments, however long they take."""
        self._envs.close()
