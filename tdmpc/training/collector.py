"""The training environments and what is known of their running episodes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
        self._actions_taken: list[list[np.ndarray]] = [[] for _ in range(envs.num_envs)]  # of running episodes

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
            self.replay.end(step.truncated)
        self._obs, self._first = step.obs, step.terminated | step.truncated
        self._returns += step.reward
        self._lengths += 1
        for taken, action in zip(self._actions_taken, self._action, strict=True):
            taken.append(action)
        self.agent.lifetime.steps += self.envs.num_envs
        good = self._first & ~step.failed
        return Ended(self._returns[good].tolist(), self._lengths[good].tolist(), int(step.failed.sum()))

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the running episodes exactly, between two steps."""
        taken = [np.array(actions, np.float32).reshape(-1, self.envs.action_size) for actions in self._actions_taken]
        arrays = (self._obs, self._first, self._episodes_begun, self._returns, self._lengths)
        return {
            "arrays": [torch.from_numpy(array.copy()) for array in arrays],
            "actions_taken": [torch.from_numpy(actions) for actions in taken],
            "planner": self._planner_state.state_dict(),
            "warm_up": self._warm_up.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from a state: reset every environment with the seed of its episode and repeat its actions.

        Returns:
            The environments whose own randomness led elsewhere. Their episodes count as truncated where they were.
        """
        arrays = [tensor.numpy().copy() for tensor in state["arrays"]]
        self._obs, self._first, self._episodes_begun, self._returns, self._lengths = arrays
        self._actions_taken = [list(actions.numpy()) for actions in state["actions_taken"]]
        self._planner_state.load_state_dict(state["planner"])
        self._warm_up.bit_generator.state = state["warm_up"]
        if not self._episodes_begun.any():
            return []
        elsewhere = self._repeat_episodes()
        self._first |= elsewhere
        return np.flatnonzero(elsewhere).tolist()

    def _repeat_episodes(self) -> np.ndarray:
        """Bring the environments where they were; return which ones did not get there, `[E]` bool."""
        reached = self.envs.reset(np.ones(self.envs.num_envs, bool), self._seeds_of(self._episodes_begun - 1))
        action, ended = self._action.copy(), np.zeros(self.envs.num_envs, bool)
        # Of an episode that has ended nothing needs repeating: its environment is reset before it moves.
        lengths = np.where(self._first, 0, self._lengths)
        for t in range(lengths.max()):
            active = (t < lengths) & ~ended
            if not active.any():
                break
            for env in np.flatnonzero(active):
                action[env] = self._actions_taken[env][t]
            step = self.envs.step(action, active)
            reached, ended = step.obs, ended | step.terminated | step.truncated
        same = (reached == self._obs).all(axis=1) & ~ended
        return ~self._first & ~same

    def _begin_episodes(self) -> None:
        """Reset the environments whose episode ended, each with the seed of its next episode."""
        with self.timers("env"), self.timers("reset"):
            self._obs = self.envs.reset(self._first, self._seeds_of(self._episodes_begun))
        self.replay.begin(self._obs, self._first)
        self._episodes_begun += self._first
        self._returns[self._first], self._lengths[self._first] = 0.0, 0
        for env in np.flatnonzero(self._first):
            self._actions_taken[env] = []

    def _seeds_of(self, episodes: np.ndarray) -> list[int]:
        """Return the reset seed of an episode of every environment."""
        numbered = enumerate(episodes.tolist())
        return [self.seeds.integer(Stream.TRAIN_EPISODE, env, episode) for env, episode in numbered]

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
