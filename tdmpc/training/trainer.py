"""The online loop: act, step the environments, update, evaluate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tdmpc.seeding import Seeds, Stream
from tdmpc.training.evaluation import Evaluation, Evaluator
from tdmpc.training.progress import Progress
from tdmpc.training.schedule import Every, Ratio

if TYPE_CHECKING:
    from envs import StepResult, VectorEnv
    from tdmpc.agent.agent import TDMPC2
    from tdmpc.replay import ReplayBuffer
    from tdmpc.telemetry.recorder import Recorder


class UnexpectedTerminationError(RuntimeError):
    """An episode terminated though the agent was told that none would."""


@dataclass(frozen=True)
class TrainerSettings:
    """When things happen; all in steps over all environments."""

    steps: int
    seed_steps: int
    steps_per_update: float
    batch_size: int
    eval_freq: int
    eval_episodes: int
    log_freq: int
    episodic: bool


class Trainer:
    """Train an agent online on vectorised environments whose episodes end independently.

    The trainer drives the objects it is handed and owns none of them. Random actions fill the replay first
    (seeding phase), then the updates that these steps have earned are made up (pretraining), then acting and
    updating alternate. Updates run while the environments step, so the newest transition they can see is the one
    before; this holds for environments in this process too, which makes all modes of stepping identical.
    """

    def __init__(
        self,
        agent: "TDMPC2",
        envs: "VectorEnv",
        replay: "ReplayBuffer",
        evaluator: Evaluator,
        recorder: "Recorder",
        seeds: Seeds,
        settings: TrainerSettings,
        save: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Take the parts; `save(step)` is called after every evaluation of something learned."""
        self.agent, self.envs, self.replay, self.evaluator = agent, envs, replay, evaluator
        self.recorder, self.seeds, self.settings, self.save = recorder, seeds, settings, save
        self.progress = Progress()
        self.last_evaluation: Evaluation | None = None
        self.should_log = Every(settings.log_freq, start=settings.log_freq)
        self.should_evaluate = Every(settings.eval_freq, start=0)
        self.updates_due = Ratio(settings.steps_per_update)
        self._seeding_ended: int | None = None  # the step at which it did
        self._warm_up = seeds.generator(Stream.WARM_UP)
        self._planner_state = agent.initial_state(envs.num_envs, seeds.integer(Stream.PLANNER))
        self._obs = np.zeros((envs.num_envs, envs.observation_size), np.float32)
        self._first = np.ones(envs.num_envs, dtype=bool)
        self._episodes_begun = np.zeros(envs.num_envs, dtype=np.int64)
        self._returns, self._lengths = np.zeros(envs.num_envs), np.zeros(envs.num_envs, dtype=np.int64)
        self._window_start = (0, recorder.elapsed_s)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.progress.steps >= self.settings.steps

    def train(self) -> Progress:
        """Train until `steps` are done and return how far it came.

        Raises:
            UnexpectedTerminationError: an episode terminated and `episodic` is false.
            EmptyReplayError: no episode of the seeding phase was as long as a slice.
            EnvironmentCrash: an environment failed in a way that is not part of the task.
        """
        while not self.finished:
            if self.should_evaluate(self.progress.steps):
                self.evaluate()
            self._begin_episodes()
            action = self._choose_actions()
            self.envs.step_async(action)
            self._update()
            self._store(action, self.envs.step_wait())
            self.recorder.advance(self.progress.steps)
            if self.should_log(self.progress.steps) or self.finished:
                self._log()
        self.evaluate()
        return self.progress

    def evaluate(self) -> None:
        """Evaluate the agent as it is and record the outcome."""
        progress, episodes = self.progress, self.settings.eval_episodes
        self.recorder.announce(f"evaluating {episodes} episodes ...")
        began = self.recorder.elapsed_s
        outcome = self.last_evaluation = self.evaluator.evaluate(episodes, progress.eval_rounds)
        progress.eval_rounds += 1
        progress.eval_episodes += episodes
        self.recorder.write(
            {
                "kind": "eval",
                "step": progress.steps,
                "elapsed_s": self.recorder.elapsed_s,
                "eval/episode_reward": float(outcome.returns.mean()),
                "eval/episode_reward_std": float(outcome.returns.std()),
                "eval/episode_length": float(outcome.lengths.mean()),
                "eval/episodes": episodes,
                "eval/failed_episodes": outcome.failures,
                "eval/duration_s": self.recorder.elapsed_s - began,
                "progress/updates": progress.updates,
            }
        )
        if progress.updates:
            self.save(progress.steps)

    def _begin_episodes(self) -> None:
        """Reset the environments whose episode ended, each with the seed of its next episode."""
        if not self._first.any():
            return
        episodes = enumerate(self._episodes_begun)
        seeds = [self.seeds.integer(Stream.TRAIN_EPISODE, env, int(episode)) for env, episode in episodes]
        self._obs = self.envs.reset(self._first, seeds)
        self.replay.begin(self._obs, self._first)
        self._episodes_begun += self._first
        self._returns[self._first], self._lengths[self._first] = 0.0, 0

    def _choose_actions(self) -> np.ndarray:
        """Return actions [E, A]: random in the seeding phase, the agent's afterwards."""
        if self.progress.steps < self.settings.seed_steps:
            return self._warm_up.uniform(-1, 1, (self.envs.num_envs, self.envs.action_size)).astype(np.float32)
        if self._seeding_ended is None:
            self._pretrain()
        obs, first = (torch.from_numpy(a).to(self.agent.device) for a in (self._obs, self._first))
        action, self._planner_state = self.agent.act(obs, self._planner_state, first, explore=True)
        return action.cpu().numpy()

    def _pretrain(self) -> None:
        """End the seeding phase and make the updates that its steps have earned."""
        self._seeding_ended = self.progress.steps
        updates = Ratio(self.settings.steps_per_update)(self.settings.seed_steps)
        self.recorder.announce(f"pretraining: {updates} updates on {self.progress.steps} random steps ...")
        self._run_updates(updates)
        self.progress.pretraining_updates += updates
        self.recorder.log("pretrain", self.progress.steps, **{"progress/updates": self.progress.updates})

    def _update(self) -> None:
        """Make the updates due once the step under way has ended."""
        if self._seeding_ended is not None:
            steps = self.progress.steps + self.envs.num_envs - self._seeding_ended
            self._run_updates(self.updates_due(steps))

    def _run_updates(self, count: int) -> None:
        for _ in range(count):
            self.recorder.record_update(self.agent.update(self.replay.sample(self.settings.batch_size)))
            self.progress.updates += 1

    def _store(self, action: np.ndarray, step: "StepResult") -> None:
        """Take in what a step led to."""
        self._check_terminations(step.terminated)
        self.replay.add(action, step.reward, step.obs, step.terminated)
        if step.failed.any():
            self.replay.discard(step.failed)
        self._obs, self._first = step.obs, step.terminated | step.truncated
        self._returns += step.reward
        self._lengths += 1
        self.progress.steps += self.envs.num_envs
        self.progress.vector_steps += 1
        self.progress.failed_episodes += int(step.failed.sum())
        self.agent.lifetime.steps += self.envs.num_envs
        for env in np.flatnonzero(self._first & ~step.failed):
            self.progress.episodes += 1
            self.recorder.record("train/episode_reward", float(self._returns[env]))
            self.recorder.record("train/episode_length", int(self._lengths[env]))

    def _check_terminations(self, terminated: np.ndarray) -> None:
        if terminated.any() and not self.settings.episodic:
            env = int(np.flatnonzero(terminated)[0])
            raise UnexpectedTerminationError(
                f"episodic=false: an episode terminated (environment {env}, step {self.progress.steps}); "
                "set episodic=true for tasks whose episodes can terminate"
            )

    def _log(self) -> None:
        step, now = self.progress.steps, self.recorder.elapsed_s
        last_step, last_time = self._window_start
        self._window_start = (step, now)
        self.recorder.log(
            "train",
            step,
            **{
                "rate/steps_per_s": (step - last_step) / max(now - last_time, 1e-9),
                "progress/episodes": self.progress.episodes,
                "progress/failed_episodes": self.progress.failed_episodes,
                "progress/updates": self.progress.updates,
            },
        )
