"""The training environments and what is known of their running episodes."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tdmpc.seeding import Seeds, Stream

if TYPE_CHECKING:
    from envs import VectorEnv
    from tdmpc.agent.agent import TDMPC2
    from tdmpc.replay import ReplayBuffer
    from tdmpc.telemetry.timers import Timers


class UnexpectedTerminationError(RuntimeError):
    """An episode terminated though the agent was told that none would."""


class Ended(NamedTuple):
    """Episodes that ended in a step: `returns` and `lengths` of the good ones, and how many failed."""

    returns: list[float]
    lengths: list[int]
    failed: int


class Collector:
    """Step the training environments into the replay, each through its own episodes.

    A step has two halves, `begin_step` and `end_step`, between which the environments may be at work while the
    caller does something else.

    Args:
        agent: who acts.
        envs: the training environments.
        replay: where transitions go.
        seeds: of the run.
        timers: sections `act`, `env/reset`, `env/step`, `env/wait` and `replay/add`.
        episodic: whether episodes may terminate.
    """

    def __init__(
        self,
        agent: "TDMPC2",
        envs: "VectorEnv",
        replay: "ReplayBuffer",
        seeds: Seeds,
        timers: "Timers",
        episodic: bool,
    ) -> None:
        self.agent, self.envs, self.replay = agent, envs, replay
        self.seeds, self.timers, self.episodic = seeds, timers, episodic
        self._warm_up = seeds.generator(Stream.WARM_UP)
        self._planner_state = agent.initial_state(envs.num_envs, seeds.integer(Stream.PLANNER))
        self._obs = np.zeros((envs.num_envs, envs.observation_size), np.float32)
        self._action = np.zeros((envs.num_envs, envs.action_size), np.float32)
        self._first = np.ones(envs.num_envs, dtype=bool)
        self._episodes_begun = np.zeros(envs.num_envs, dtype=np.int64)
        self._returns, self._lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=np.int64)

    def begin_step(self, random: bool) -> None:
        """Reset where an episode ended, choose actions, and let the environments begin to take them.

        Args:
            random: act uniformly at random instead of asking the agent.
        """
        if self._first.any():
            self._begin_episodes()
        with self.timers("act"):
            self._action = self._random_actions() if random else self._agent_actions()
        with self.timers("env"), self.timers("step"):
            self.envs.step_async(self._action)

    def end_step(self) -> Ended:
        """Wait for the environments, store what happened and return the episodes that ended.

        Raises:
            UnexpectedTerminationError: an episode terminated and `episodic` is false.
        """
        with self.timers("env"), self.timers("wait"):
            step = self.envs.step_wait()
        self._check_terminations(step.terminated)
        with self.timers("replay"), self.timers("add"):
            self.replay.add(self._action, step.reward, step.obs, step.terminated)
            if step.failed.any():
                self.replay.discard(step.failed)
        self._obs, self._first = step.obs, step.terminated | step.truncated
        self._returns += step.reward
        self._lengths += 1
        self.agent.lifetime.steps += self.envs.num_envs
        good = self._first & ~step.failed
        return Ended(self._returns[good].tolist(), self._lengths[good].tolist(), int(step.failed.sum()))

    def _begin_episodes(self) -> None:
        """Reset the environments whose episode ended, each with the seed of its next episode."""
        episodes = enumerate(self._episodes_begun)
        seeds = [self.seeds.integer(Stream.TRAIN_EPISODE, env, int(episode)) for env, episode in episodes]
        with self.timers("env"), self.timers("reset"):
            self._obs = self.envs.reset(self._first, seeds)
        self.replay.begin(self._obs, self._first)
        self._episodes_begun += self._first
        self._returns[self._first], self._lengths[self._first] = 0.0, 0

    def _random_actions(self) -> np.ndarray:
        return self._warm_up.uniform(-1, 1, self._action.shape).astype(np.float32)

    def _agent_actions(self) -> np.ndarray:
        obs, first = (torch.from_numpy(array).to(self.agent.device) for array in (self._obs, self._first))
        action, self._planner_state = self.agent.act(obs, self._planner_state, first, explore=True)
        return action.cpu().numpy()

    def _check_terminations(self, terminated: np.ndarray) -> None:
        if terminated.any() and not self.episodic:
            env = int(np.flatnonzero(terminated)[0])
            raise UnexpectedTerminationError(
                f"episodic=false: an episode of environment {env} terminated after {self._lengths[env] + 1} steps; "
                "set episodic=true for tasks whose episodes can terminate"
            )
