import math

import pytest
import torch
from tensordict import TensorDict

from tdmpc.telemetry.metrics import Reduce
from tdmpc.telemetry.recorder import Accumulator, NonFiniteError, Recorder
from tests.training.builders import ListSink


def at(step):
    return {"step": step, "frames": 2 * step, "updates": step // 2, "elapsed_s": step / 10}


@pytest.fixture
def recorder_and_sink():
    sink = ListSink()
    return Recorder([sink], wall_clock=lambda: 1e9), sink


def losses(**values):
    return TensorDict({name: torch.tensor(float(value)) for name, value in values.items()})


def test_a_row_holds_the_reductions_of_its_window_alone(recorder_and_sink):
    recorder, sink = recorder_and_sink
    recorder.record("train/episode_reward", 1)
    recorder.record("train/episode_reward", 4)
    recorder.end_window("train", at(100), **{"progress/episodes": 7})
    recorder.record("train/episode_reward", 10)
    recorder.end_window("train", at(200))
    recorder.end_window("train", at(300))
    assert sink.rows == [
        {"kind": "train", "time": 1e9, **at(100), "progress/episodes": 7, "train/episode_reward": 2.5},
        {"kind": "train", "time": 1e9, **at(200), "train/episode_reward": 10},
        {"kind": "train", "time": 1e9, **at(300)},
    ]


def test_metrics_of_updates_are_means_over_all_updates_of_the_window(recorder_and_sink):
    recorder, sink = recorder_and_sink
    metrics = [losses(total_loss=value) for value in (1, 2, 6)]
    for values in metrics:
        recorder.record_update(values)
    recorder.end_window("train", at(5))
    recorder.end_window("train", at(6))
    assert sink.rows[0]["train/total_loss"] == 3
    assert "train/total_loss" not in sink.rows[1]
    assert [float(values["total_loss"]) for values in metrics] == [1, 2, 6]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_by_name_and_its_row_is_written(recorder_and_sink, bad):
    recorder, sink = recorder_and_sink
    for value in (1, bad, 1):
        recorder.record_update(losses(total_loss=1, value_loss=value))
    with pytest.raises(NonFiniteError, match=f"^train/value_loss is {bad} in the window that ends at step 40"):
        recorder.check_finite(40)
    with pytest.raises(NonFiniteError):
        recorder.end_window("train", at(40))
    assert len(sink.rows) == 1


def test_a_value_without_a_declaration_is_refused(recorder_and_sink):
    recorder, _ = recorder_and_sink
    with pytest.raises(KeyError, match="no metric 'train/speed' is declared"):
        recorder.record("train/speed", 1)
    with pytest.raises(KeyError, match="train/speed"):
        recorder.write("train", at(1), **{"train/speed": 1})


def test_a_failing_sink_is_reported_once_and_the_others_go_on():
    class Broken(ListSink):
        def write(self, row):
            raise OSError("disk full")

    good = ListSink()
    recorder = Recorder([Broken(), good])
    for step in range(3):
        recorder.write("train", at(step))
    assert len(good.rows) == 3
    assert good.texts == ["warning: Broken failed (OSError: disk full); training goes on without it"]


@pytest.mark.parametrize(("reduce", "expected"), [(Reduce.MEAN, 2), (Reduce.MAX, 5), (Reduce.LAST, 0), (Reduce.SUM, 6)])
def test_values_are_reduced_as_declared(reduce, expected):
    accumulator = Accumulator(reduce)
    for value in (1, 5, 0):
        accumulator.add(value)
    assert accumulator.value() == expected
