"""One place of a vector of environments, in whichever process it is."""

import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

IDLE = np.nan
"""The value of an action that is not to be taken."""


class Slot(gymnasium.Env):
    """An environment that reports what happens to it as data, in `info`, the same way from every process.

    - It is built at the first reset, so that processes build theirs at the same time, and an error then is
      reported like any other.
    - The end of an episode is `info={"terminated": True}` or `{"truncated": True}`, with `"failed": True` if a
      failure ended it. The two flags that `step` returns are always False: `SyncVectorEnv` refuses to step
      an environment that raised one, yet this one may stay idle while the others go on.
    - An exception is `info={"crash": traceback}`.
    - An action `IDLE` leaves everything as it is.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], observation_size: int, action_size: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation_size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (action_size,), np.float32)
        self._make = make
        self._env: gymnasium.Env | None = None
        self._obs = np.zeros(observation_size, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        try:
            if self._env is None:
                self._env = self._make()
            self._obs, _ = self._env.reset(seed=seed, options=options)
        except Exception:
            return self._obs, {"crash": traceback.format_exc()}
        return self._obs, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take a step, unless the action is `IDLE`."""
        if np.isnan(action[0]):
            return self._obs, 0.0, False, False, {}
        assert self._env is not None
        try:
            self._obs, reward, terminated, truncated, info = self._env.step(action)
        except Exception:
            return self._obs, 0.0, False, False, {"crash": traceback.format_exc()}
        return self._obs, float(reward), False, False, _ending(terminated, truncated, info["failed"])

    def render(self) -> Any:
        """Return what the environment renders."""
        if self._env is None:
            raise RuntimeError("there is nothing to see before the first episode")
        return self._env.render()

    def close(self) -> None:
        """Close the environment, if it was built."""
        if self._env is not None:
            self._env.close()


def _ending(terminated: bool, truncated: bool, failed: bool) -> dict[str, bool]:
    # Of the environment's own info nothing is passed on: sending it costs more than most steps.
    if not (terminated or truncated):
        return {}
    return {"terminated": bool(terminated), "truncated": bool(truncated), "failed": failed}
