"""Evaluation in its own environments, with its own random streams."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tdmpc.seeding import Seeds, Stream

if TYPE_CHECKING:
    from envs import VectorEnv
    from tdmpc.agent.agent import TDMPC2


@dataclass(frozen=True)
class Evaluation:
    """Outcome of an evaluation; one entry an episode, in the order of their numbers.

    Attributes:
        returns: sum of rewards, `[episodes]`.
        lengths: steps, `[episodes]`.
        failures: episodes cut short by a physics error or a value that is not finite.
    """

    returns: np.ndarray
    lengths: np.ndarray
    failures: int


class Evaluator:
    """Run whole episodes without exploration.

    Every episode is decided on beforehand and runs to its end, so short episodes are not favoured. Weights,
    training environments and training's random streams are left as they are.

    Args:
        agent: whom to evaluate.
        envs: environments of its own; any number, the episodes are run in groups of so many.
        seeds: of the run; episode and planner seeds depend on the round and the episode.
    """

    def __init__(self, agent: "TDMPC2", envs: "VectorEnv", seeds: Seeds) -> None:
        self.agent, self.envs, self.seeds = agent, envs, seeds

    def evaluate(self, episodes: int, round: int) -> Evaluation:
        """Run exactly `episodes` episodes; the same round of the same weights gives the same numbers."""
        returns, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)
        failures = 0
        for begin in range(0, episodes, self.envs.num_envs):
            group = np.arange(begin, min(begin + self.envs.num_envs, episodes))
            failures += self._run_group(group, round, returns, lengths)
        return Evaluation(returns, lengths, failures)

    def _run_group(self, group: np.ndarray, round: int, returns: np.ndarray, lengths: np.ndarray) -> int:
        """Run the episodes of these numbers side by side, adding to `returns` and `lengths`; count the failures."""
        running = np.arange(self.envs.num_envs) < len(group)
        seeds = [self.seeds.integer(Stream.EVAL_EPISODE, round, group[0] + i) for i in range(len(running))]
        obs = self.envs.reset(running, seeds)
        state = self.agent.initial_state(len(group), self.seeds.integer(Stream.EVAL_PLANNER, round, group[0]))
        first, failures = True, 0
        actions = np.zeros((len(running), self.envs.action_size), np.float32)
        while running.any():
            seen = torch.from_numpy(obs[running]).to(self.agent.device)
            action, state = self.agent.act(
                seen, state, torch.full((len(seen),), first, device=seen.device), explore=False
            )
            actions[running] = action.cpu().numpy()
            step = self.envs.step(actions, running)
            episodes = group[running[: len(group)]]
            returns[episodes] += step.reward[running]
            lengths[episodes] += 1
            failures += int(step.failed[running].sum())
            still = ~(step.terminated | step.truncated)[running]
            state = state.select(torch.from_numpy(np.flatnonzero(still)).to(seen.device))
            running[running] = still
            obs, first = step.obs, False
        return failures
