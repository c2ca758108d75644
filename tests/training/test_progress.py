import dataclasses
import json

import pytest

from tdmpc.training.progress import Counts, Phase, Progress, sum_counts


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def run(progress, clock):
    """Seed for 10 s, pretrain for 20 s, train for 30 s with an evaluation of 5 s and saving of 1 s in it."""
    clock.now += 2
    progress.enter(Phase.SEEDING)
    clock.now += 10
    progress.advance(steps=1000, vector_steps=250, episodes=2)
    progress.enter(Phase.PRETRAINING)
    clock.now += 20
    progress.advance(updates=250, pretraining_updates=250)
    progress.enter(Phase.TRAINING)
    clock.now += 15
    progress.advance(steps=300, vector_steps=75, updates=75)
    with progress.during(Phase.EVALUATION):
        clock.now += 5
    with progress.during(Phase.SAVING):
        clock.now += 1
    clock.now += 15


def test_counts_and_elapsed_time_are_kept_by_phase(clock):
    progress = Progress(clock)
    run(progress, clock)
    view = progress.view()
    assert view.total == Counts(steps=1300, vector_steps=325, episodes=2, updates=325, pretraining_updates=250)
    assert list(view.elapsed_s.items()) == list(zip(Phase, (2, 0, 10, 20, 30, 5, 0, 1), strict=True))
    assert view.total_elapsed_s == 68


def test_a_view_does_not_change_and_cannot_be_changed(clock):
    progress = Progress(clock)
    before = progress.view()
    progress.advance(steps=5)
    clock.now += 3
    assert before.total.steps == 0
    assert before.total_elapsed_s == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.total.steps = 7


def test_an_interrupted_phase_goes_on_also_after_an_error(clock):
    progress = Progress(clock)
    progress.enter(Phase.TRAINING)

    def fail_after(seconds):
        with progress.during(Phase.EVALUATION):
            clock.now += seconds
            raise KeyError

    with pytest.raises(KeyError):
        fail_after(4)
    clock.now += 1
    assert progress.view().elapsed_s[Phase.TRAINING] == 1


def test_rates_tell_the_window_from_steady_training_and_the_whole_run(clock):
    progress = Progress(clock)
    run(progress, clock)
    since = progress.view()
    with progress.during(Phase.EVALUATION):
        clock.now += 10
    with progress.during(Phase.MERGING):
        clock.now += 20
    clock.now += 10
    progress.advance(steps=80, updates=20)
    view = progress.view()
    assert view.rates(since) == {
        "rate/steps_per_s": 2,
        "rate/updates_per_s": 0.5,
        "rate/steady_steps_per_s": 8,
        "rate/run_steps_per_s": pytest.approx(1380 / 108),
    }


def test_what_was_not_done_has_no_rate_and_random_steps_are_not_steady(clock):
    progress = Progress(clock)
    progress.enter(Phase.SEEDING)
    began = progress.view()
    clock.now += 1
    progress.advance(steps=5000)
    seeded = progress.view()
    assert seeded.rates(began).keys() == {"rate/steps_per_s", "rate/run_steps_per_s"}
    progress.enter(Phase.PRETRAINING)
    clock.now += 10
    progress.advance(updates=5)
    assert progress.view().rates(seeded) == {
        "rate/updates_per_s": 0.5,
        "rate/run_steps_per_s": pytest.approx(5000 / 11),
    }


def test_eta_leaves_random_steps_and_pretraining_out_of_the_pace(clock):
    progress = Progress(clock)
    assert progress.view().eta_s(2000) is None
    run(progress, clock)
    # 300 steps took 36 s, with evaluation and saving.
    assert progress.view().eta_s(2000) == pytest.approx(700 * 36 / 300)
    assert progress.view().eta_s(1000) == 0
    with progress.during(Phase.MERGING):
        clock.now += 9
    assert progress.view().eta_s(2000) == pytest.approx(700 * 45 / 300)


def test_a_continued_run_shows_no_jump_in_rate_eta_or_elapsed_time(clock):
    first = Progress(clock)
    run(first, clock)
    state = json.loads(json.dumps(first.state_dict()))
    clock.now += 10_000  # the run was stopped for long
    second = Progress(clock)
    clock.now += 3
    second.load_state_dict(state)
    view = second.view()
    assert view.total == first.view().total
    assert view.since_start == Counts()
    assert view.total_elapsed_s == 68 + 3
    assert view.eta_s(2000) is None
    second.enter(Phase.TRAINING)
    since = second.view()
    clock.now += 10
    second.advance(steps=100)
    assert second.view().rates(since)["rate/steps_per_s"] == 10
    assert second.view().rates(since)["rate/run_steps_per_s"] == pytest.approx(1400 / 81)
    assert second.view().eta_s(2000) == pytest.approx(600 * 10 / 100)
    assert second.view().since_start.steps == 100


def test_a_group_of_workers_has_the_sums_of_their_counts():
    assert sum_counts([Counts(steps=3, updates=1), Counts(steps=4, merges=2)]) == Counts(steps=7, updates=1, merges=2)
