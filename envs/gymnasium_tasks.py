"""Gymnasium environments with continuous observations and actions, brought to one form."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from envs.errors import TaskError


def import_module_of(env_id: str) -> str:
    """Import the module of `module:Id`, which registers the environment; return the `Id`.

    The current directory counts as installed, so that a user's own module next to the run is found.

    Raises:
        TaskError: If there is no such module. An error inside the module propagates.
    """
    module, _, name = env_id.rpartition(":")
    if not module:
        return name
    if module.startswith("."):
        raise TaskError(f"task=gym:{env_id}: {module!r} is relative; name the module from the current directory on")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise TaskError(f"task=gym:{env_id}: no module {error.name!r} is installed or in {here}") from error
    return name


def make_gymnasium_task(env_id: str, options: Mapping[str, Any]) -> "FlatBox":
    """Make a Gymnasium environment with `options` and check that the agent can use it.

    Raises:
        TaskError: If it cannot be made with these options, has other than bounded Box actions of floats
            and Box observations, or has no limit of steps per episode.
    """
    name = import_module_of(env_id)
    try:
        env = gymnasium.make(name, **{"disable_env_checker": True, **options})
    except (gymnasium.error.Error, ImportError) as error:  # environments that have moved away raise the latter
        raise TaskError(f"task=gym:{env_id} cannot be made: {_one_line(error)}") from error
    except Exception as error:
        if not options:
            raise
        raise TaskError(f"task=gym:{env_id} does not take the options {dict(options)}: {_one_line(error)}") from error
    _check_usable(env_id, env)
    return FlatBox(env)


class FlatBox(gymnasium.Wrapper):
    """Flat float32 observations, which are the caller's own, and flat actions in [-1, 1]."""

    frames_per_step = 1

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        action_space, observation_space = env.action_space, env.observation_space
        assert isinstance(action_space, Box)
        assert isinstance(observation_space, Box)
        self._low = action_space.low.astype(np.float64)
        self._high = action_space.high.astype(np.float64)
        self._action_dtype = action_space.dtype
        self._size = int(np.prod(observation_space.shape))
        self.action_space = Box(-1.0, 1.0, (self._low.size,), np.float32)
        self.observation_space = Box(-np.inf, np.inf, (self._size,), np.float32)

    @property
    def max_episode_steps(self) -> int:
        """Steps after which an episode is truncated."""
        assert self.env.spec is not None
        assert self.env.spec.max_episode_steps is not None
        return self.env.spec.max_episode_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._flat(obs), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Apply an action `[A]` in [-1, 1]."""
        obs, reward, terminated, truncated, info = self.env.step(self._unscaled(action))
        return self._flat(obs), reward, terminated, truncated, info

    def _unscaled(self, action: np.ndarray) -> np.ndarray:
        half = action.reshape(self._low.shape).astype(np.float64) / 2
        # Weighted ends, since both bounds then come out exactly; environments may assert that they are kept.
        return (self._low * (0.5 - half) + self._high * (0.5 + half)).astype(self._action_dtype)

    def _flat(self, obs: Any) -> np.ndarray:
        # A copy, for the environment may write its next observation into the same array.
        return np.array(obs, dtype=np.float32).reshape(self._size)


def _check_usable(env_id: str, env: gymnasium.Env) -> None:
    if not (_is_float_box(env.action_space) and env.action_space.is_bounded()):
        raise TaskError(
            f"task=gym:{env_id} has actions {_one_line(env.action_space)}; a bounded Box of floats is needed"
        )
    if not _is_float_box(env.observation_space):
        raise TaskError(
            f"task=gym:{env_id} has observations {_one_line(env.observation_space)}; a Box of floats is needed"
        )
    if env.spec is None or env.spec.max_episode_steps is None:
        raise TaskError(f"task=gym:{env_id} has no limit of steps per episode; pass env.max_episode_steps=N")


def _is_float_box(space: gymnasium.Space) -> TypeGuard[Box]:
    return isinstance(space, Box) and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
