import json

import numpy as np
import pytest

from tdmpc.telemetry.history import (
    Group,
    HistoryError,
    Run,
    Shares,
    curve,
    group_seeds,
    mean_curve,
    read_rows,
    read_run,
    run_series,
    shares,
)

RETURN = "eval/episode_reward"


def evaluations(returns_by_step):
    rows = [{"kind": "eval", "step": step, RETURN: value} for step, value in returns_by_step.items()]
    return Run("walker-walk", "default", rows)


def timed(*windows):
    rows = [
        {"kind": "train", "elapsed_s": end_s, **{f"time/{name}/share": share for name, share in sections.items()}}
        for end_s, sections in windows
    ]
    return Run("walker-walk", "default", rows)


def series(x, y):
    return np.array(x, float), np.array(y, float)


def test_a_torn_last_line_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 5}\n{"kind": "train", "st')
    assert read_rows(path) == [{"kind": "train", "step": 5}]
    path.write_bytes(b'{"kind": "tr')
    assert read_rows(path) == []
    path.write_bytes(b"")
    assert read_rows(path) == []


def test_a_last_line_that_only_lacks_its_end_is_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 5}')
    assert read_rows(path) == [{"kind": "train", "step": 5}]


@pytest.mark.parametrize("damage", ['{"kind": "tr', "17", ""])
def test_any_other_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
    with pytest.raises(HistoryError, match="line 2 is not a row"):
        read_rows(path)


def test_values_that_are_no_finite_numbers_are_absent(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "a": NaN, "b": null, "c": "x", "d": Infinity}\n{"step": 2}\n')
    assert read_rows(path) == [{"kind": "train", "step": 1}, {"kind": None, "step": 2}]


def test_a_run_is_named_by_its_config_and_otherwise_by_its_path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_run(tmp_path) == Run("", str(tmp_path), [])
    (tmp_path / "config.yaml").write_text("task: cup-catch\nexp_name: 7\nseed: 3\n")
    assert read_run(tmp_path) == Run("cup-catch", "7", [])


@pytest.mark.parametrize("text", ["{", "- a list", ""])
def test_a_broken_config_is_refused(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train"}))
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(HistoryError, match=r"config\.yaml: is not a configuration"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("names", "title", "groups"),
    [
        (["walk default"], "walk · default", {"": 1}),
        (["walk default", "walk default"], "walk · default", {"": 2}),
        (["walk a", "walk b", "walk a"], "walk", {"a": 2, "b": 1}),
        (["walk a", "run a"], "a", {"walk": 1, "run": 1}),
        (["walk a", "run b"], "", {"walk · a": 1, "run · b": 1}),
    ],
)
def test_seeds_are_grouped_and_named_by_what_differs(names, title, groups):
    found_title, found = group_seeds([Run(*name.split(), rows=[]) for name in names])
    assert found_title == title
    assert {group.name: len(group.runs) for group in found} == groups
    assert [group.number for group in found] == list(range(len(groups)))


def test_a_series_is_sorted_and_the_last_row_of_a_step_counts():
    run = Run(
        "walker-walk",
        "default",
        [
            {"kind": "train", "step": 20, "loss": 2.0},
            {"kind": "train", "step": 10, "loss": 5.0},
            {"kind": "train", "step": 10, "loss": 1.0},
            {"kind": "train", "step": 30},
            {"kind": "train", "loss": 9.0},
            {"kind": "pretrain", "step": 15, "loss": 9.0},
        ],
    )
    found = run_series(run, "train", "step", "loss")
    assert found is not None
    np.testing.assert_equal(found, ([10, 20], [1, 2]))
    assert run_series(run, "train", "step", "other_loss") is None


def test_one_run_is_drawn_through_its_own_points():
    line = mean_curve([series([0, 7, 9], [1, 2, 4])])
    assert line is not None
    np.testing.assert_equal([line.x, line.mean, line.low, line.high], [[0, 7, 9], *[[1, 2, 4]] * 3])
    assert line.runs == 1


def test_runs_are_interpolated_and_averaged_where_all_of_them_are():
    line = mean_curve([series([0, 10, 20], [0, 10, 20]), series([5, 15, 25], [20, 20, 40])])
    assert line is not None
    np.testing.assert_equal(line.x, [5, 10, 15, 20])
    np.testing.assert_allclose(line.mean, [12.5, 15, 17.5, 25])
    np.testing.assert_allclose(line.low, [5, 10, 15, 20])
    np.testing.assert_allclose(line.high, [20, 20, 20, 30])
    assert line.runs == 2


def test_without_a_common_stretch_there_is_no_mean():
    assert mean_curve([series([0, 1], [0, 0]), series([2, 3], [0, 0])]) is None
    assert mean_curve([]) is None


def test_a_seed_without_the_metric_is_not_counted():
    group = Group(0, "", [evaluations({0: 10.0, 100: 30.0}), evaluations({}), evaluations({0: 20.0, 100: 50.0})])
    line = curve(group, "eval", "step", RETURN)
    assert line is not None
    assert line.runs == 2
    np.testing.assert_allclose(line.mean, [15, 40])
    assert curve(group, "eval", "elapsed_s", RETURN) is None


def test_shares_are_those_of_the_outermost_sections_and_0_in_windows_without_them():
    run = timed((10, {"act": 0.75, "act/plan": 0.5, "other": 0.25}), (40, {"act": 0.25, "evaluate": 0.75}))
    part = shares(Group(0, "", [run]))
    assert part is not None
    np.testing.assert_equal(part.end_s, [10, 40])
    np.testing.assert_equal(dict(part.sections), {"act": [0.75, 0.25], "evaluate": [0, 0.75], "other": [0.25, 0]})
    assert part.overall("act") == pytest.approx((10 * 0.75 + 30 * 0.25) / 40)


def test_shares_of_seeds_hold_for_their_whole_window_and_stay_complete():
    first = timed((10, {"act": 1.0}), (30, {"act": 0.5, "update": 0.5}))
    second = timed((20, {"update": 1.0}), (50, {"act": 1.0}))
    part = shares(Group(0, "", [first, second, timed()]))
    assert isinstance(part, Shares)
    assert part.runs == 2
    np.testing.assert_equal(part.end_s, [10, 20, 30])
    np.testing.assert_allclose(part.sections["act"], [0.5, 0.25, 0.75])
    np.testing.assert_allclose(part.sections["act"] + part.sections["update"], 1)


def test_untimed_runs_have_no_shares():
    assert shares(Group(0, "", [evaluations({0: 1.0}), timed()])) is None
