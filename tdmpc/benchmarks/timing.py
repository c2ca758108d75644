"""Time a call again and again, and say what is typical of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

LEAST_REPEATS = 3

Call = Callable[[], Any]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Timed:
    """What is timed: `call`, and `prepare` before every call, which does not count."""

    call: Call
    prepare: Call = nothing


@dataclass(frozen=True)
class Timing:
    """Seconds that a call took: the first, which may compile or allocate, and the counted ones."""

    first_s: float
    samples_s: tuple[float, ...]

    @cached_property
    def median_s(self) -> float:
        """The median of the counted calls."""
        return float(np.median(self.samples_s))

    @property
    def min_s(self) -> float:
        """The fastest of the counted calls."""
        return min(self.samples_s)

    @cached_property
    def p90_s(self) -> float:
        """The 90 % quantile of the counted calls."""
        return float(np.quantile(self.samples_s, 0.9))

    @property
    def repeats(self) -> int:
        """The number of counted calls."""
        return len(self.samples_s)

    def __add__(self, other: "Timing") -> "Timing":
        """Return the times of two calls that were timed in turn, one after the other."""
        samples = tuple(sum(pair) for pair in zip(self.samples_s, other.samples_s, strict=True))
        return Timing(self.first_s + other.first_s, samples)


@dataclass(frozen=True)
class Stopwatch:
    """Repeat calls until there are enough times.

    Attributes:
        repeats: counted calls at most.
        budget_s: seconds after which no more calls are made, once there are `LEAST_REPEATS`; preparing counts here.
        clock: seconds.
        synchronize: waits for the device, before a call begins and after it ends.
    """

    repeats: int
    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    synchronize: Call = nothing

    def time(self, call: Call, prepare: Call = nothing) -> Timing:
        """Time one call."""
        return self.time_in_turn([Timed(call, prepare)])[0]

    def time_in_turn(self, timed: Sequence[Timed]) -> list[Timing]:
        """Time several calls round by round, so that a machine that changes its pace does so for all of them.

        Sample i of each is from round i.
        """
        first = self._round(timed)
        self._round(timed)  # the second call may still settle: caches, allocators, the frequency of the CPU
        rounds, began = [], self.clock()
        while len(rounds) < self.repeats and (len(rounds) < LEAST_REPEATS or self.clock() - began < self.budget_s):
            rounds.append(self._round(timed))
        return [Timing(*pair) for pair in zip(first, zip(*rounds, strict=True), strict=True)]

    def _round(self, timed: Sequence[Timed]) -> list[float]:
        return [self._once(one) for one in timed]

    def _once(self, one: Timed) -> float:
        one.prepare()
        self.synchronize()
        began = self.clock()
        one.call()
        self.synchronize()
        return self.clock() - began
