from tdmpc.benchmarks.compare import compare
from tests.benchmarks.builders import record, results


def lines(before, now, threshold=1.1):
    return list(compare(before, now, threshold).lines())


def test_what_got_slower_is_named_in_one_sentence_the_worst_first():
    before = [record("plan", 0.1, model_size=5, num_envs=1), record("update", 0.2, model_size=5), record("add", 1e-4)]
    now = [record("plan", 0.12, model_size=5, num_envs=1), record("update", 0.5, model_size=5), record("add", 1.05e-4)]
    *table, verdict = lines(results(*before), results(*now))
    assert verdict == "slower: update of size 5 (2.50 times), plan of size 5 with 1 environment (1.20 times)"
    assert [line.split() for line in table[1:]] == [
        ["plan", "5", "1", "100", "ms", "120", "ms", "1.20", "slower"],
        ["update", "5", "200", "ms", "500", "ms", "2.50", "slower"],
        ["add", "100", "us", "105", "us", "1.05"],
    ]


def test_the_threshold_itself_counts_as_slower():
    before, now = results(record(median_s=2.0)), results(record(median_s=3.0))
    assert compare(before, now, 1.5).slower
    assert not compare(before, now, 1.51).slower


def test_what_got_faster_is_marked_and_not_slower():
    before, now = results(record(median_s=0.2)), results(record(median_s=0.1))
    *_, line, verdict = lines(before, now)
    assert line.endswith("0.50  faster")
    assert verdict == "nothing got slower by a factor of 1.1"


def test_records_are_paired_by_operation_size_environments_and_variant():
    kinds = [
        {"name": "env_step", "num_envs": 4, "variant": "sync"},
        {"name": "env_step", "num_envs": 4, "variant": "async"},
        {"name": "env_step", "num_envs": 1, "variant": "sync"},
        {"name": "plan", "num_envs": 4, "model_size": 1},
        {"name": "plan", "num_envs": 4, "model_size": 5},
    ]
    before = [record(median_s=1.0 + i, **kind) for i, kind in enumerate(kinds)]
    now = [record(median_s=2.0 + 2 * i, **kind) for i, kind in reversed(list(enumerate(kinds)))]
    comparison = compare(results(*before), results(*now), 1.1)
    assert [change.ratio for change in comparison.changes] == [2.0] * 5


def test_what_only_one_of_them_measured_is_named():
    before = results(record("plan", model_size=1), record("plan", model_size=5), record("update"), record("add"))
    now = results(record("env_step", num_envs=1, variant="sync"), record("add"))
    assert lines(before, now)[-3:] == [
        "only in the baseline: 2 of plan, 1 of update",
        "not in the baseline: 1 of env_step",
        "nothing got slower by a factor of 1.1",
    ]
    assert lines(results(record("plan")), results(record("add")))[-1].startswith("nothing to compare")


def test_another_machine_is_said_first():
    now = results(record(), machine={"threads": 1, "torch": "2.7.0", "date": "2026-02-02"})
    assert lines(results(record()), now)[0] == "not measured alike: threads 1 (was 2); torch 2.7.0 (was 2.6.0)"


def test_other_settings_are_said_first_unless_they_change_no_time():
    before = results(record(), config={"batch_size": 256, "num_envs": [1], "repeats": 5, "earlier_key": 1})
    now = results(record(), config={"batch_size": 8, "num_envs": [1, 4], "repeats": 9, "out": "b.json", "new_key": 1})
    assert lines(before, now)[0] == "not measured alike: batch_size 8 (was 256)"


def test_results_that_are_alike_begin_with_the_table():
    assert lines(results(record()), results(record()))[0].split()[:2] == ["op", "size"]
