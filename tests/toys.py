"""Toy environments whose truth is known: `gym:tests.toys:Toy-v0` and its relatives."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from dm_control.rl.control import PhysicsError
from gymnasium.spaces import Box, Dict, Discrete

MAX_EPISODE_STEPS = 50


class Toy(gymnasium.Env):
    """Observe `(id, episode, t)` and be paid `reward_of(id, episode, t, action)`.

    The id is that of the first reset seed (modulo 2^20, so that float32 holds it), the episode counts this instance's
    resets from 0, t its steps. The reset seed decides the length (`min_length`..`max_length` steps) and whether the
    end is termination or truncation. The observation array is reused, as environments may do.

    Args:
        log_dir: If given, the file `<id>.jsonl` in it gets one line a reset and a step: the truth to compare with.
        trouble: What happens at step `trouble_at` of episode 0 if the id is `trouble_id` (or that is None):
            nan_obs, nan_reward, physics, raise, exit, hang.
        needs_file: A file without which the environment cannot be built.
    """

    def __init__(
        self,
        min_length: int = 3,
        max_length: int = 12,
        action_size: int = 2,
        log_dir: str | None = None,
        trouble: str | None = None,
        trouble_at: int = 2,
        trouble_id: int | None = None,
        needs_file: str | None = None,
    ) -> None:
        if needs_file is not None:
            Path(needs_file).read_text()
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = Box(-2.0, 4.0, (action_size,), np.float32)
        self._lengths = (min_length, max_length)
        self._log_dir = log_dir
        self._trouble = (trouble, trouble_at, trouble_id)
        self._obs = np.array([-1, -1, 0], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self._obs[0] < 0:
            self._obs[0] = (seed or 0) % 2**20
        self._obs[1:] = (self._obs[1] + 1, 0)
        self._length = int(self.np_random.integers(*self._lengths, endpoint=True))
        self._terminates = bool(self.np_random.random() < 0.5)
        self._log({"seed": seed})
        return self._obs, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._obs[2] += 1
        trouble, at, env_id = self._trouble
        if self._obs[2] == at and self._obs[1] == 0 and env_id in (None, self._obs[0]):
            early = self._make(trouble)
            if early is not None:
                return early
        reward = reward_of(self._obs, action)
        over = bool(self._obs[2] >= self._length)
        terminated, truncated = over and self._terminates, over and not self._terminates
        self._log(
            {"action": action.tolist(), "reward": reward, "terminated": terminated, "truncated": truncated},
        )
        return self._obs, reward, terminated, truncated, {"failed": True, "note": "info of an environment's own"}

    def _make(self, trouble: str | None) -> Any:
        match trouble:
            case "nan_obs":
                return np.full(3, np.nan, np.float32), 1.0, True, False, {}
            case "nan_reward":
                return self._obs, np.nan, True, False, {}
            case "physics":
                raise PhysicsError("toy divergence")
            case "raise":
                raise KeyError("toy trouble")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(60)

    def _log(self, entry: dict[str, Any]) -> None:
        if self._log_dir is not None:
            env_id, episode, t = (int(value) for value in self._obs)
            path = Path(self._log_dir) / f"{env_id}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps({"id": env_id, "episode": episode, "t": t, **entry}) + "\n")


class ToyRepeatable(Toy):
    """Know nothing of earlier episodes: the id is that of the reset seed, the episode always 0."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self._obs[:] = (-1, -1, 0)
        return super().reset(seed=seed, options=options)


class ToyForgetful(Toy):
    """Draw from a generator that no seed reaches, so that no episode can be repeated."""

    _unseeded = np.random.default_rng()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, *rest = super().step(action)
        return obs + self._unseeded.random(3, np.float32), *rest


class ToyDiscrete(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = Discrete(2)


class ToyDict(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict({"a": Box(0, 1, (2,), np.float32)})


class ToyIdle(Toy):
    def __init__(self) -> None:
        super().__init__(action_size=0)


class ToyBlind(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(-1, 1, (0,), np.float32)


class ToyProcess(Toy):
    """Observe how the process was set up: its threads, how many of the signals that stop a run it ignores, its id."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        blocked = len({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1} & signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return np.array([int(os.environ.get("OMP_NUM_THREADS", -1)), blocked, os.getpid()], np.float32), {}


def reward_of(obs: np.ndarray, action: np.ndarray) -> float:
    """Pay differently for every step, exactly in float32 for actions that are multiples of 1/8."""
    return float(obs[2] + obs[1] / 8 + np.sum(action))


gymnasium.register("Toy-v0", Toy, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyEndless-v0", Toy)
gymnasium.register("ToyRepeatable-v0", ToyRepeatable, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyForgetful-v0", ToyForgetful, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyDiscrete-v0", ToyDiscrete, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyDict-v0", ToyDict, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyIdle-v0", ToyIdle, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyBlind-v0", ToyBlind, max_episode_steps=MAX_EPISODE_STEPS)
gymnasium.register("ToyProcess-v0", ToyProcess, max_episode_steps=MAX_EPISODE_STEPS)
