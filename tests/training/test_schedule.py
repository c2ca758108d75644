import pytest

from tdmpc.training.schedule import Every, Ratio


def test_every_is_due_at_each_multiple_once():
    every = Every(10, start=0)
    assert [count for count in range(0, 35) if every(count)] == [0, 10, 20, 30]
    assert not every(34)


def test_every_is_due_by_crossing_and_once_for_a_jump_over_several_points():
    every = Every(10, start=10)
    assert [count for count in (0, 7, 14, 21, 28, 56, 63) if every(count)] == [14, 21, 56, 63]


def test_every_continues_from_its_state():
    every = Every(10, start=0)
    every(25)
    other = Every(10, start=0)
    other.load_state_dict(every.state_dict())
    assert not other(29)
    assert other(30)


@pytest.mark.parametrize("steps_per_update", [1, 2, 3, 4, 7, 0.5, 0.1, 0.3, 2.5, 1.1])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_ratio_carries_fractions_exactly(steps_per_update, stride):
    ratio = Ratio(steps_per_update)
    total, steps = 0, 0
    for _ in range(300):
        steps += stride
        total += ratio(steps)
        assert total == steps * 10 // round(steps_per_update * 10)


def test_ratio_continues_from_its_state():
    ratio = Ratio(4)
    ratio(7)
    other = Ratio(4)
    other.load_state_dict(ratio.state_dict())
    assert other(8) == 1
