import io

import pytest

from tdmpc.telemetry.console import LEGEND, Console, duration, line
from tdmpc.telemetry.metrics import METRICS

EVAL = {
    "kind": "eval",
    "step": 2000,
    "eval/episode_reward": 812.25,
    "eval/episode_reward_std": 3.0,
    "eval/episodes": 10,
    "eval/duration_s": 12.0,
}
TRAIN = {
    "kind": "train",
    "step": 1_234_500,
    "train/episode_reward": 999.5,
    "progress/episodes": 12345,
    "train/total_loss": 0.12345,
    "rate/steps_per_s": 123.456,
    "progress/eta_s": 36_061.0,
    "time/update/mean_s": 0.0712,
    "time/update/max_s": 0.0954,
    "time/act/mean_s": 0.101,
    "time/act/max_s": 0.233,
    "time/env/mean_s": 0.0002,
    "time/env/max_s": 1.25,
    "time/env/wait/mean_s": 0.0006,
    "time/env/wait/max_s": 1.25,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize("row", [TRAIN, EVAL])
def test_a_line_fits_the_terminal_and_keeps_the_essentials(row, columns):
    text = line(row, columns)
    assert len(text) <= columns
    essentials = ["1,234,500", "R 999.5", "ep 12345", "loss 0.123", "st/s 123.5", "ETA 10:01:01"]
    for essential in essentials if row is TRAIN else ["2,000", "R 812.2", "n 10"]:
        assert essential in text


def test_a_wider_terminal_shows_more_sections_the_most_important_first():
    assert "update 71|95" in line(TRAIN, 80)
    assert "act" not in line(TRAIN, 80)
    assert "update 71|95 act 101|233 env 1|1250" in line(TRAIN, 100)
    assert line(TRAIN, None) == line(TRAIN, 140)


def test_a_usual_run_has_update_and_acting_in_80_columns():
    usual = {"step": 123_400, "progress/episodes": 123, "train/episode_reward": 99.5, "rate/steps_per_s": 31.2}
    assert "update 71|95 act 54|73" in line({**TRAIN, **usual, "time/act/mean_s": 0.054, "time/act/max_s": 0.073,
                                             "progress/eta_s": 3000.0}, 80)  # fmt: skip


def test_the_legend_explains_every_short_name():
    text = " ".join(LEGEND.split())
    for metric in METRICS:
        if metric.short:
            assert f"{metric.short}: " in f" {text}", metric.name
            assert metric.sentence.rstrip(".") in text
    assert max(len(text) for text in LEGEND.splitlines()) <= 100


def test_without_a_terminal_there_are_lines_and_no_bar():
    stream = io.StringIO()
    console = Console(2000, stream)
    console.announce("evaluating ...")
    console.advance(100, 60.0)
    console.write(TRAIN)
    console.write(EVAL)
    console.close()
    text = stream.getvalue()
    assert text.splitlines()[0] == "evaluating ..."
    assert text.count(LEGEND) == 1
    assert text.endswith(line(EVAL, None) + "\n")
    assert "\r" not in text
    assert "\x1b" not in text


def test_a_plain_console_has_no_bar_on_a_terminal_either():
    stream = Terminal()
    console = Console(2000, stream, plain=True, columns=lambda: 80)
    console.advance(100, 60.0)
    console.write(TRAIN)
    console.close()
    assert "\r" not in stream.getvalue()
    assert max(len(text) for text in stream.getvalue().splitlines() if text not in LEGEND) <= 80


def test_a_terminal_shows_steps_eta_and_return_below_the_lines():
    stream = Terminal()
    console = Console(2000, stream, columns=lambda: 100)
    console.write(EVAL)
    console.advance(1004, 75.0)
    console.write(EVAL)
    console.advance(2004, 0.0)
    console.close()
    assert "1004/2000 steps, ETA 1:15, R 812" in stream.getvalue()
    assert "2000/2000 steps, ETA 0:00, R 812" in stream.getvalue()


def test_a_bar_without_an_eta_or_a_return_shows_what_there_is():
    stream = Terminal()
    console = Console(2000, stream, columns=lambda: 100)
    console.advance(200, None, "pretraining 1/50")
    console.write(EVAL)
    console.advance(200, None, "pretraining 2/50")
    console.advance(204, None)
    console.close()
    assert "200/2000 steps, pretraining 1/50" in stream.getvalue()
    assert "204/2000 steps, R 812" in stream.getvalue()
    assert ", ," not in stream.getvalue()


def test_runs_that_share_a_console_have_labels_and_no_bars():
    stream = Terminal()
    console = Console(2000, stream, label="worker 3", columns=lambda: 80)
    console.advance(100, 60.0)
    console.announce("first\n\nsecond")
    console.write(TRAIN)
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["worker 3 | first", "worker 3 | ", "worker 3 | second"]
    assert all(text.startswith("worker 3 | ") for text in lines)
    assert "\r" not in stream.getvalue()
    assert len(lines[-1]) <= 80


def test_a_round_of_merging_is_in_the_lines_of_windows_that_had_one():
    assert "round" not in line(TRAIN, None)
    assert " round 4 " in line({**TRAIN, "merge/round": 4}, None)


def test_nothing_is_shown_before_the_run_begins():
    stream = Terminal()
    Console(2000, stream).close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")])
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
