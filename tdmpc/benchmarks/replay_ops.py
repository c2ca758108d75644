"""The replay: drawing a batch from a full buffer, adding to it."""

from collections.abc import Iterator

import numpy as np
import torch

from envs import VectorEnv
from tdmpc.benchmarks.bench import Bench
from tdmpc.benchmarks.results import Record
from tdmpc.replay import ReplayBuffer
from tdmpc.seeding import Seeds, Stream

CHUNK_ROWS = 50_000


def time_replay(bench: Bench, like: VectorEnv, num_envs: int) -> Iterator[Record]:
    """Time `sample` and `add` on a full replay of `num_envs` environments `like` these."""
    config = bench.config
    replay = ReplayBuffer(
        num_envs=num_envs,
        capacity=config.buffer_size,
        observation_size=like.observation_size,
        action_size=like.action_size,
        horizon=config.horizon,
        rng=Seeds(config.seed).generator(Stream.REPLAY),
        device=bench.device,
    )
    fill(replay, config.buffer_size, num_envs, like)
    if "sample" in config.ops:
        timing = bench.stopwatch.time(lambda: replay.sample(config.batch_size))
        yield bench.record("sample", timing, num_envs=num_envs, bytes=replay.sample(config.batch_size).bytes())
    if "add" in config.ops:
        obs, action = (np.zeros((num_envs, size), np.float32) for size in (like.observation_size, like.action_size))
        reward, terminated = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.bool_)
        timing = bench.stopwatch.time(lambda: replay.add(action, reward, obs, terminated))
        yield bench.record("add", timing, num_envs=num_envs, bytes=num_envs * replay.row_bytes)


def fill(replay: ReplayBuffer, capacity: int, num_envs: int, like: VectorEnv) -> None:
    """Fill a replay to its capacity with random rows, as of whole episodes of environments `like` these.

    Straight into the rings: step by step it would take minutes.
    """
    ring, length = capacity // num_envs, like.max_episode_steps
    whole = {"cursor": [ring] * num_envs, "filled": [ring] * num_envs, "running": [True] * num_envs}
    replay.load_state_dict(replay.state_dict() | whole)
    for env in range(num_envs):
        for begin in range(0, ring, CHUNK_ROWS):
            positions = np.arange(begin, min(begin + CHUNK_ROWS, ring))
            columns = {
                "obs": torch.randn(len(positions), like.observation_size),
                "action": torch.rand(len(positions), like.action_size) * 2 - 1,
                "reward": torch.rand(len(positions)),
                "terminated": torch.zeros(len(positions), dtype=torch.bool),
                "timestep": torch.from_numpy(positions % (length + 1)).int(),
            }
            replay.write(np.full(len(positions), env), positions, columns)
