import json

import numpy as np
import pytest

from tdmpc.benchmarks.curves import Track, charged_s, last_row, track_of, value_at
from tdmpc.benchmarks.goals import PUBLISHED_BEST, Goals, goals_of
from tests.benchmarks.fake_training import eval_row, row


def track(*points, steps=None):
    times, returns = zip(*points, strict=True)
    return Track(np.array(times, float), np.array(returns, float), np.array(steps or times, float))


def test_only_phases_of_training_are_charged():
    # Seeding 1 s, pretraining 5 s, training 20 s; setting up, compiling and evaluating are free.
    assert charged_s(row("train", 300, 20.0, evaluation_s=99.0)) == 26.0
    assert charged_s(eval_row(0, 0.0, 1.0)) == 0.0


def test_a_curve_is_drawn_over_the_time_that_was_charged():
    rows = [eval_row(0, 0.0, 1.0), row("train", 300, 20.0), eval_row(400, 30.0, 5.0, evaluation_s=50.0)]
    found = track_of([rows])
    assert found is not None
    assert found.charged_s.tolist() == [0.0, 36.0]
    assert found.returns.tolist() == [1.0, 5.0]
    assert found.steps.tolist() == [0.0, 400.0]


def test_workers_are_averaged_at_equal_time_and_their_steps_add_up():
    slow = [eval_row(0, 0.0, 0.0), eval_row(200, 34.0, 10.0)]  # charged 40 s at the end
    fast = [eval_row(0, 0.0, 0.0), eval_row(100, 4.0, 4.0), eval_row(500, 44.0, 8.0)]  # 10 s, then 50 s
    found = track_of([slow, fast])
    assert found is not None
    assert found.charged_s.tolist() == [0.0, 10.0, 40.0]
    assert found.returns.tolist() == pytest.approx([0.0, (2.5 + 4) / 2, (10 + 7) / 2])
    assert found.steps.tolist() == pytest.approx([0.0, 50 + 100, 200 + 400])


def test_workers_of_which_one_was_never_evaluated_have_no_curve():
    assert track_of([[eval_row(0, 0.0, 0.0)], [row("train", 100, 1.0)]]) is None
    assert track_of([[]]) is None


def test_an_evaluation_without_a_return_is_left_out():
    failed = {name: value for name, value in eval_row(10, 1.0, 0.0).items() if name != "eval/episode_reward"}
    found = track_of([[eval_row(0, 0.0, 2.0), failed]])
    assert found is not None
    assert found.returns.tolist() == [2.0]


def test_a_curve_ends_at_the_budget_between_two_evaluations():
    within = track((0, 0), (50, 10), (70, 30), steps=[0, 500, 900]).until(60)
    assert within.charged_s.tolist() == [0, 50, 60]
    assert within.returns.tolist() == [0, 10, 20]
    assert within.steps.tolist() == [0, 500, 700]


def test_a_curve_that_ends_before_the_budget_is_left_as_it_is():
    whole = track((0, 0), (50, 10))
    assert whole.until(60) is whole
    assert whole.until(50) is whole


@pytest.mark.parametrize(
    ("threshold", "seconds"),
    [(0, 0.0), (-5, 0.0), (5, 10.0), (10, 20.0), (12.5, 55.0), (15, 60.0), (15.1, None)],
)
def test_the_time_to_a_return_is_that_of_the_first_crossing(threshold, seconds):
    curve = track((0, 0), (20, 10), (30, 4), (50, 10), (60, 15), (80, 11))
    assert curve.time_to(threshold) == seconds


def test_a_counter_is_known_at_every_moment_and_stays_after_the_end():
    rows = [eval_row(0, 0.0, 0.0), row("train", 100, 4.0), row("train", 300, 14.0)]
    assert value_at(rows, "step", np.array([5.0, 15.0, 99.0])).tolist() == [50.0, 200.0, 300.0]


def test_the_last_row_is_the_last_whole_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) is None
    path.write_text("")
    assert last_row(path) is None
    path.write_text('{"step": 1')
    assert last_row(path) is None
    filler = json.dumps({"step": 1, "filler": "x" * 100}) + "\n"
    path.write_text(filler * 2000 + '{"step": 7}\n{"step": 8')
    assert last_row(path) == {"step": 7}


def test_returns_are_measured_by_the_published_best():
    goals = goals_of("walker-walk", None, [])
    assert goals == Goals(980, 0.0, goals.source if goals else "")
    assert goals is not None
    assert goals.threshold(50) == 490
    assert all(0 < best <= 1000 for best in PUBLISHED_BEST.values())


def test_without_a_published_best_it_is_the_best_seen_from_untrained_agents_on():
    runs = [track((0, -1400), (10, -900)), track((0, -1200), (10, -300))]
    goals = goals_of("gym:Pendulum-v1", None, runs)
    assert goals is not None
    assert (goals.floor, goals.best) == (-1300, -300)
    assert goals.threshold(80) == -500
    assert goals.time_to(80, runs[1]) == pytest.approx(10 * 700 / 900)
    assert goals.time_to(80, runs[0]) is None
    assert goals_of("gym:Pendulum-v1", None, []) is None


def test_the_best_that_is_set_wins():
    goals = goals_of("walker-walk", 500.0, [])
    assert goals is not None
    assert (goals.best, goals.threshold(80)) == (500, 400)


def test_where_nothing_was_learned_no_share_of_the_best_is_reached():
    goals = goals_of("gym:Pendulum-v1", None, [track((0, -1400))])
    assert goals is not None
    assert goals.time_to(50, track((0, -1400))) is None
