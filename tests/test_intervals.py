import numpy as np
import pytest

from tdmpc.intervals import mean_interval, ratio_interval


def test_the_same_values_always_give_the_same_interval():
    values = [3.0, 8.0, 1.0, 9.0]
    assert mean_interval(values) == mean_interval(values)
    assert ratio_interval(values, values[::-1]) == ratio_interval(values, values[::-1])


def test_the_interval_of_a_mean_is_about_two_standard_errors_to_either_side():
    values = np.random.default_rng(3).normal(10, 2, size=400)
    interval = mean_interval(list(values))
    assert interval is not None
    error = values.std() / 20
    assert interval == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.2 * error)


def test_what_pairs_have_in_common_does_not_widen_the_interval_of_their_ratio():
    pace = np.array([1.0, 1.5, 0.7, 2.0, 1.1])
    assert ratio_interval(list(6 * pace), list(3 * pace)) == pytest.approx((2, 2))
    independent = ratio_interval(list(6 * pace), list(3 * pace[::-1]))
    assert independent is not None
    assert independent[0] < 1.9 < 2.1 < independent[1]


def test_one_value_has_no_interval():
    assert mean_interval([1.0]) is None
    assert mean_interval([]) is None
    assert ratio_interval([1.0], [2.0]) is None


def test_only_pairs_have_a_ratio():
    with pytest.raises(ValueError, match="2 and 1 values are no pairs"):
        ratio_interval([1.0, 2.0], [1.0])
