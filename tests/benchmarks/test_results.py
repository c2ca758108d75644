import json

import pytest

from tdmpc.benchmarks.results import HEADER, Results, duration, plain
from tdmpc.config import BenchmarkConfig
from tdmpc.keys import ConfigError
from tests.benchmarks.builders import record, results

FULL = record("plan", 0.105, model_size=317, num_envs=16, gflop=12.5, gflops_per_s=119.0, peak_share=0.66)


def test_results_come_back_from_json_as_they_were(tmp_path):
    written = results(FULL, record("save", bytes=10**8), config=plain(BenchmarkConfig(env={"a": 1}, task="gym:A-v0")))
    written.write(tmp_path / "a.json")
    assert Results.read(tmp_path / "a.json") == written


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    results(FULL).write(tmp_path / "a.json")
    with pytest.raises(FileExistsError):
        results().write(tmp_path / "a.json")
    assert Results.read(tmp_path / "a.json") == results(FULL)


def test_fields_that_are_not_known_yet_are_left_out(tmp_path):
    path = tmp_path / "a.json"
    results(FULL).write(path)
    content = json.loads(path.read_text())
    content["records"][0]["joules"] = 3
    path.write_text(json.dumps(content))
    assert Results.read(path) == results(FULL)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "records": [{"name": "plan"}]}'])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        Results.read(path)
    assert str(refusal.value) == f"baseline={path}: must be a JSON file that scripts/benchmark.py wrote"


def test_a_file_that_is_not_there_or_of_another_format_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ConfigError, match=r"a\.json: cannot be read \(No such file or directory\)$"):
        Results.read(path)
    path.write_text('{"format": 2, "machine": {}, "config": {}, "records": []}')
    with pytest.raises(ConfigError, match=r"a\.json: is of format 2; must be of format 1$"):
        Results.read(path)


@pytest.mark.parametrize(
    "line",
    [
        FULL.line(),
        record("env_step", 123.4, num_envs=16, variant="async").line(),
        record("overlap", 0.1, model_size=317, num_envs=16, variant="both", hidden_s=-0.0123, hidden_frac=-1.23).line(),
        record("save", 0.1, model_size=317, bytes=123456789).line(),
    ],
)
def test_the_table_is_aligned_and_fits_100_columns(line):
    assert len(HEADER) == 100
    assert len(line) <= 100
    end_of_median = HEADER.index("median") + len("median")
    assert line[:end_of_median].endswith("s")
    assert line[end_of_median] == " "


def test_a_line_has_the_arithmetic_or_what_else_there_is_to_say():
    assert FULL.line().split()[-4:] == ["5", "12.5", "119", "66%"]
    assert record(gflop=0.5, gflops_per_s=3.0).line().split()[-3:] == ["5", "0.50", "3.00"]
    assert record(bytes=123456789).line().endswith(" 123 MB")
    assert record(bytes=512).line().endswith(" 512 B")
    assert record(hidden_s=0.00312, hidden_frac=0.78).line().endswith(" hides 3.12 ms, 78%")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 us"), (1.5e-6, "1.50 us"), (0.001, "1.00 ms"), (0.0523, "52.3 ms"), (0.9, "900 ms"), (61.0, "61.0 s")],
)
def test_durations_have_three_digits(seconds, text):
    assert duration(seconds) == text
