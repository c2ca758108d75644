import pytest
import torch
from tensordict import TensorDict

from tdmpc.telemetry.recorder import Recorder
from tests.training.builders import ListSink


@pytest.fixture
def recorder_and_sink():
    sink, ticks = ListSink(), iter(range(0, 1000, 10))
    return Recorder([sink], clock=lambda: next(ticks)), sink


def test_a_row_holds_the_means_of_its_window_alone(recorder_and_sink):
    recorder, sink = recorder_and_sink
    recorder.record("train/episode_reward", 1)
    recorder.record("train/episode_reward", 4)
    recorder.log("train", 100, **{"progress/updates": 7})
    recorder.record("train/episode_reward", 10)
    recorder.log("train", 200)
    recorder.log("train", 300)
    assert sink.rows == [
        {"kind": "train", "step": 100, "elapsed_s": 10, "progress/updates": 7, "train/episode_reward": 2.5},
        {"kind": "train", "step": 200, "elapsed_s": 20, "train/episode_reward": 10},
        {"kind": "train", "step": 300, "elapsed_s": 30},
    ]


def test_metrics_of_updates_are_means_over_all_updates_of_the_window(recorder_and_sink):
    recorder, sink = recorder_and_sink
    metrics = [TensorDict({"total_loss": torch.tensor(float(value))}) for value in (1, 2, 6)]
    for values in metrics:
        recorder.record_update(values)
    recorder.log("train", 5)
    recorder.log("train", 6)
    assert sink.rows[0]["train/total_loss"] == 3
    assert "train/total_loss" not in sink.rows[1]
    assert [float(values["total_loss"]) for values in metrics] == [1, 2, 6]
