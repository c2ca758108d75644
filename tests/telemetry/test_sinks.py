import io
import json

import pytest

from tdmpc.telemetry.sinks import Console, EvalCsv, JsonLines

EVAL = {
    "kind": "eval",
    "step": 2000,
    "elapsed_s": 61.5,
    "eval/episode_reward": 812.25,
    "eval/episode_reward_std": 3.0,
    "eval/episode_length": 500.0,
    "eval/episodes": 10,
}
TRAIN = {"kind": "train", "step": 1500, "elapsed_s": 50.0, "train/episode_reward": 99.5, "rate/steps_per_s": 12.34}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_jsonl_appends_every_row_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(TRAIN)
    assert json.loads(path.read_text()) == TRAIN
    sink.close()
    again = JsonLines(path)
    again.write(EVAL)
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [TRAIN, EVAL]


def test_eval_csv_has_the_published_columns_and_only_evaluations(tmp_path):
    path = tmp_path / "eval.csv"
    for _ in range(2):
        sink = EvalCsv(path)
        sink.write(TRAIN)
        sink.write(EVAL)
        sink.close()
    assert path.read_text().splitlines() == ["step,episode_reward", "2000,812.25", "2000,812.25"]


def test_console_without_a_terminal_prints_lines_and_no_bar():
    stream = io.StringIO()
    console = Console(2000, stream)
    console.announce("evaluating ...")
    console.write(TRAIN)
    console.advance(1500)
    console.write(EVAL)
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "evaluating ..."
    assert lines[1].split() == ["1,500", "50.0s", "train", "R", "99.5", "12.3", "steps/s"]
    assert "R 812.2" in lines[2]
    assert len(lines) == 3
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.filterwarnings("error")
def test_console_on_a_terminal_shows_steps_eta_and_return():
    stream = Terminal()
    console = Console(2000, stream)
    console.write(EVAL)
    console.advance(1004)
    console.advance(2004)
    console.close()
    assert "2000/2000" in stream.getvalue()
    assert "R 812" in stream.getvalue()
