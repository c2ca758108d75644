"""How sure one can be of a mean or a ratio of few values: intervals by the bootstrap."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 10_000
SEED = 0  # the same values always give the same interval

Interval = tuple[float, float]
"""Lower and upper end."""


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean; None where there are fewer than two values to resample."""
    return _interval(len(values), lambda chosen: np.asarray(values, float)[chosen].mean(-1))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the ratio of two means, mean `above` over mean `below`.

    The values are pairs, as of runs that were made one after the other, and pairs are what is resampled: what both
    have in common, such as the pace of the machine, does not widen the interval.

    Returns:
        None where there are fewer than two pairs.

    Raises:
        ValueError: the numbers of values differ.
    """
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} values are no pairs")
    first, second = np.asarray(above, float), np.asarray(below, float)
    return _interval(len(first), lambda chosen: first[chosen].mean(-1) / second[chosen].mean(-1))


def _interval(count: int, statistic: Callable[[NDArray[np.intp]], NDArray[np.float64]]) -> Interval | None:
    if count < 2:
        return None
    chosen = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(statistic(chosen), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
