"""The environments: a step of all of them, by itself and while the agent learns."""

from collections.abc import Iterator

import numpy as np

from envs import VectorEnv, make_vector
from tdmpc.benchmarks.bench import Bench
from tdmpc.benchmarks.results import Record
from tdmpc.seeding import Seeds, Stream


class Stepper:
    """Step environments by random actions; `prepare` before every step resets those whose episode has ended.

    Args:
        envs: to step.
        seeds: of episodes and actions.
    """

    def __init__(self, envs: VectorEnv, seeds: Seeds) -> None:
        self._envs, self._seeds = envs, seeds
        self._actions = seeds.generator(Stream.WARM_UP)
        self._ended, self._episodes = np.ones(envs.num_envs, np.bool_), 0
        self._action = np.zeros((envs.num_envs, envs.action_size), np.float32)

    def prepare(self) -> None:
        """Do what a step needs and is not part of it."""
        if self._ended.any():
            numbers = range(self._envs.num_envs)
            self._envs.reset(
                self._ended, [self._seeds.integer(Stream.TRAIN_EPISODE, env, self._episodes) for env in numbers]
            )
            self._episodes += 1
        self._action = self._actions.uniform(-1, 1, self._action.shape).astype(np.float32)

    def step(self) -> None:
        """Step all environments."""
        self.send()
        self.wait()

    def send(self) -> None:
        """Begin a step, which goes on in the processes of asynchronous environments."""
        self._envs.step_async(self._action)

    def wait(self) -> None:
        """Finish the step that was begun."""
        result = self._envs.step_wait()
        self._ended = result.terminated | result.truncated


def time_steps(bench: Bench, num_envs: int) -> Iterator[Record]:
    """Time a step of `num_envs` environments in this process and in processes of their own, or as `vector` says."""
    config = bench.config
    for vector in ("sync", "async") if config.vector == "auto" else (config.vector,):
        with make_vector(config.task, num_envs, vector=vector, options=config.env) as envs:
            stepper = Stepper(envs, Seeds(config.seed))
            timing = bench.stopwatch.time(stepper.step, stepper.prepare)
        yield bench.record("env_step", timing, num_envs=num_envs, variant=vector)
