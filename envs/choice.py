"""The choice between environments in this process and in their own."""

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from envs.slot import Slot

Mode = Literal["sync", "async"]

CHILD_S = 250e-6
"""What a step costs a child process beyond the step itself: waking up with cold caches, pickling, pipes."""

PARENT_S = 50e-6
"""What sending an action to one child and receiving its answer costs the parent."""

WORTHWHILE = 0.7
"""Share of the time in this process below which children are chosen. They cost seconds to start, memory, and
cores that training uses as well; and measured gains stay behind those predicted."""

_SAMPLE_STEPS = 50
_SAMPLE_S = 0.2


def choose_mode(make_slot: Callable[[], Slot], num_envs: int) -> Mode:
    """Choose where a step of all environments takes less time.

    One environment is made and stepped for at most `_SAMPLE_S` seconds, with a median of t. E environments take
    E t in this process, and about ceil(E / C) (t + `CHILD_S`) + E `PARENT_S` in children on C cores.
    """
    share = math.ceil(num_envs / available_cores())
    # A daemonic process, such as a worker of a pool, cannot have children.
    if share == num_envs or multiprocessing.current_process().daemon:
        return "sync"
    step_s = step_seconds(make_slot)
    children_s = share * (step_s + CHILD_S) + num_envs * PARENT_S
    return "async" if children_s < WORTHWHILE * num_envs * step_s else "sync"


def available_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_seconds(make_slot: Callable[[], Slot]) -> float:
    """Measure the median time of a step with random actions; 0 if the environment crashes."""
    slot = make_slot()
    rng = np.random.default_rng(0)
    _, info = slot.reset(seed=0)
    times = [0.0] if info else []
    end = time.perf_counter() + _SAMPLE_S
    while not info and len(times) < _SAMPLE_STEPS and time.perf_counter() < end:
        action = rng.uniform(-1, 1, slot.action_space.shape).astype(np.float32)
        start = time.perf_counter()
        info = slot.step(action)[-1]
        times.append(time.perf_counter() - start)
    slot.close()
    return statistics.median(times)
