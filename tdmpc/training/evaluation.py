"""Evaluation in its own environments, with its own random streams."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tdmpc.seeding import Seeds, Stream

if TYPE_CHECKING:
    from envs import VectorEnv
    from tdmpc.agent.agent import TDMPC2
    from tdmpc.agent.planner import PlannerState
    from tdmpc.telemetry.timers import Timers


@dataclass(frozen=True)
class Evaluation:
    """Outcome of an evaluation; one entry an episode, in the order of their numbers.

    Attributes:
        returns: sum of rewards, `[episodes]`.
        lengths: steps, `[episodes]`.
        failed: which ones a physics error or a value that is not finite cut short, `[episodes]` bool.
        duration_s: seconds that it took.
    """

    returns: np.ndarray
    lengths: np.ndarray
    failed: np.ndarray
    duration_s: float

    def metrics(self) -> dict[str, float]:
        """Return what is logged of it."""
        return {
            "eval/episode_reward": float(self.returns.mean()),
            "eval/episode_reward_std": float(self.returns.std()),
            "eval/episode_reward_min": float(self.returns.min()),
            "eval/episode_length": float(self.lengths.mean()),
            "eval/episodes": len(self.returns),
            "eval/failed_episodes": int(self.failed.sum()),
            "eval/duration_s": self.duration_s,
        }


def _nothing() -> None:
    """Do nothing."""


class Evaluator:
    """Run whole episodes without exploration.

    Every episode is decided on beforehand and runs to its end, so short episodes are not favoured. Weights,
    training environments and training's random streams are left as they are.

    Args:
        agent: whom to evaluate.
        envs: environments of its own; any number, the episodes are run in groups of so many.
        seeds: of the run; episode and planner seeds depend on the round and the episode.
        timers: sections `act` and `env`.
    """

    def __init__(self, agent: "TDMPC2", envs: "VectorEnv", seeds: Seeds, timers: "Timers") -> None:
        self.agent, self.envs, self.seeds, self.timers = agent, envs, seeds, timers

    def evaluate(
        self,
        episodes: int,
        round: int,
        take_picture: Callable[[], None] = _nothing,
        watch: Callable[[], None] = _nothing,
    ) -> Evaluation:
        """Run exactly `episodes` episodes; the same round of the same weights gives the same numbers.

        Args:
            episodes: how many.
            round: number of the evaluation, from which all its seeds derive.
            take_picture: called at every step of the first episode, which is in environment 0.
            watch: called at every step, for what must not wait for the end.
        """
        began = time.monotonic()
        outcome = Evaluation(np.zeros(episodes), np.zeros(episodes, np.int64), np.zeros(episodes, bool), 0.0)
        for begin in range(0, episodes, self.envs.num_envs):
            group = np.arange(begin, min(begin + self.envs.num_envs, episodes))
            self._run_group(group, round, outcome, take_picture if begin == 0 else _nothing, watch)
        return replace(outcome, duration_s=time.monotonic() - began)

    def _run_group(
        self,
        group: np.ndarray,
        round: int,
        outcome: Evaluation,
        take_picture: Callable[[], None],
        watch: Callable[[], None],
    ) -> None:
        """Run the episodes of these numbers side by side, adding to the entries of `outcome`."""
        running = np.arange(self.envs.num_envs) < len(group)
        seeds = [self.seeds.integer(Stream.EVAL_EPISODE, round, group[0] + env) for env in range(len(running))]
        obs, first = self.envs.reset(running, seeds), True
        state = self.agent.initial_state(len(running), self.seeds.integer(Stream.EVAL_PLANNER, round, group[0]))
        state = state.select(torch.from_numpy(group - group[0]).to(self.agent.device))
        actions = np.zeros((len(running), self.envs.action_size), np.float32)
        take_picture()
        while running.any():
            watch()
            with self.timers("act"):
                actions[running], state = self._act(obs[running], state, first)
            with self.timers("env"):
                step = self.envs.step(actions, running)
            if running[0]:
                take_picture()
            episodes = group[running[: len(group)]]
            outcome.returns[episodes] += step.reward[running]
            outcome.lengths[episodes] += 1
            outcome.failed[episodes] = step.failed[running]
            still = ~(step.terminated | step.truncated)[running]
            state = state.select(torch.from_numpy(np.flatnonzero(still)).to(self.agent.device))
            running[running] = still
            obs, first = step.obs, False

    def _act(self, obs: np.ndarray, state: "PlannerState", first: bool) -> tuple[np.ndarray, "PlannerState"]:
        """Choose actions; all episodes of a group begin together."""
        device = self.agent.device
        begins = torch.full((len(obs),), first, device=device)
        action, state = self.agent.act(torch.from_numpy(obs).to(device), state, begins, explore=False)
        return action.cpu().numpy(), state
