from functools import partial

import pytest

from envs import choice, make_vector
from envs.choice import choose_mode, step_seconds
from envs.slot import Slot
from envs.tasks import make_env


@pytest.mark.parametrize(
    ("step_s", "num_envs", "cores", "mode"),
    [
        (20e-6, 16, 8, "sync"),
        (300e-6, 16, 2, "sync"),
        (300e-6, 16, 8, "async"),
        (5e-3, 4, 2, "async"),
        (5e-3, 4, 1, "sync"),
        (5e-3, 1, 8, "sync"),
    ],
)
def test_children_are_chosen_if_they_save_much_more_than_they_cost(monkeypatch, step_s, num_envs, cores, mode):
    monkeypatch.setattr(choice, "available_cores", lambda: cores)
    monkeypatch.setattr(choice, "step_seconds", lambda make_slot: step_s)
    assert choose_mode(lambda: None, num_envs) == mode


def test_a_step_is_measured_and_a_crash_takes_no_time():
    def slot(**options):
        return partial(Slot, partial(make_env, "gym:tests.toys:Toy-v0", options), 3, 2)

    assert 0 < step_seconds(slot()) < 0.1
    assert step_seconds(slot(trouble="raise", trouble_at=1)) < 0.1
    assert step_seconds(slot(needs_file="missing")) == 0.0


def test_auto_is_the_default():
    with make_vector("gym:Pendulum-v1", 2) as vector:
        assert vector.mode == "sync"
