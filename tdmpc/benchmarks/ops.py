"""The suite `ops`: every operation that training consists of, by itself."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from envs import VectorEnv, check_task, make_vector
from tdmpc.benchmarks.agent_ops import AGENT_OPS, agent_of_size
from tdmpc.benchmarks.bench import Bench
from tdmpc.benchmarks.env_ops import time_steps
from tdmpc.benchmarks.machine import describe_machine
from tdmpc.benchmarks.replay_ops import time_replay
from tdmpc.benchmarks.report import baseline_of, finish, out_file, print_machine, print_records
from tdmpc.benchmarks.results import Record, Results, plain
from tdmpc.compose import set_up_torch
from tdmpc.config import BenchmarkConfig
from tdmpc.keys import require
from tdmpc.replay import bytes_needed


def run(config: BenchmarkConfig) -> None:
    """Time the operations, print them as a table, write them as JSON, and compare them with a baseline.

    Raises:
        ConfigError, TaskError: a key does not fit what it names.
        SystemExit: an operation got slower, and that is to fail.
    """
    check_task(config.task, config.env)
    baseline = baseline_of(config)
    device = set_up_torch(config.train_config(config.model_sizes[0], num_envs=1))
    with make_vector(config.task, 1, vector="sync", options=config.env) as like:
        _check_memory(config, like)
        out = out_file(config)
        # Beside the results, because saving is to be timed on that disk.
        with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=out.parent) as folder:
            bench = Bench.set_up(config, device, Path(folder))
            machine = describe_machine(device) | {"peak_gflops_per_s": bench.gflops_per_s}
            print_machine(machine)
            records = print_records(time_all(bench, like))
    finish(Results(machine, plain(config), records), baseline, out, config)


def time_all(bench: Bench, like: VectorEnv) -> Iterator[Record]:
    """Time what is asked for: environments and replay, then the agent of each size.

    Args:
        bench: measures.
        like: an environment of the task.
    """
    chosen = bench.config.ops
    for num_envs in bench.config.num_envs:
        if "env_step" in chosen:
            yield from time_steps(bench, num_envs)
        if "sample" in chosen or "add" in chosen:
            yield from time_replay(bench, like, num_envs)
    agent_ops = [time for name, time in AGENT_OPS.items() if name in chosen]
    for model_size in bench.config.model_sizes if agent_ops else ():
        with agent_of_size(bench, model_size) as trainer:
            for time in agent_ops:
                yield from time(bench, model_size, trainer)


def _check_memory(config: BenchmarkConfig, like: VectorEnv) -> None:
    sizes = {"observation_size": like.observation_size, "action_size": like.action_size}
    needed = bytes_needed(num_envs=1, capacity=config.buffer_size, **sizes)
    free = psutil.virtual_memory().available
    allowed = f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    require(needed < free, "buffer_size", config.buffer_size, allowed)
