"""Independent random streams from one seed."""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a random stream is for. The numbers are part of every run: add new ones, never renumber."""

    INIT = 0
    UPDATE = 1
    PLANNER = 2
    REPLAY = 3
    WARM_UP = 4
    TRAIN_EPISODE = 5
    EVAL_EPISODE = 6
    EVAL_PLANNER = 7


class Seeds:
    """Seeds of every random stream of a run, distinct for distinct (seed, worker, stream, path).

    They are hashes of that tuple (numpy's `SeedSequence`), so no stream depends on how much another has drawn.

    Args:
        seed: of the run.
        worker: number of the process among those that train together.
    """

    def __init__(self, seed: int, worker: int = 0) -> None:
        self.seed, self.worker = seed, worker

    def integer(self, stream: Stream, *path: int) -> int:
        """Return a seed of 31 bits, which every library takes; `path` tells the members of a stream apart."""
        return int(self._sequence(stream, *path).generate_state(1)[0] >> 1)

    def generator(self, stream: Stream, *path: int) -> np.random.Generator:
        """Return a numpy generator for a stream."""
        return np.random.default_rng(self._sequence(stream, *path))

    def _sequence(self, stream: Stream, *path: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.worker, stream, *path))
