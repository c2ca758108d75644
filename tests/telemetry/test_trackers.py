import json
import math
import queue
import struct
import sys
import threading

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tdmpc.telemetry.metrics import cells, declaration
from tdmpc.telemetry.recorder import Recorder
from tdmpc.telemetry.trackers import Background, TensorBoard, TrackerError, WandB


def row(step, loss=0.5, **values):
    axes = {"kind": "train", "time": 1.7e9 + step, "step": step, "frames": 2 * step, "updates": step, "elapsed_s": 1.0}
    return axes | {"train/total_loss": loss, **values}


def curve(directory, name):
    """Return what TensorBoard shows for a value: (step, wall time, value) each."""
    events = EventAccumulator(str(directory)).Reload().Tensors(name)
    return [(event.step, event.wall_time, make_ndarray(event.tensor_proto).item()) for event in events]


def steps(directory, name="train/total_loss"):
    return [step for step, _, _ in curve(directory, name)]


def write(sink, *rows):
    for one in rows:
        sink.write(one)
    sink.close()


class Rows:
    """A sink that hangs at some steps until it is released, and fails at others."""

    def __init__(self, hanging=(), failing=()):
        self.steps, self.videos, self.closed = [], [], False
        self.entered, self.threads = queue.Queue(), set()
        self._gates, self._failing = {step: threading.Event() for step in hanging}, failing

    def release(self, step):
        self._gates[step].set()

    def write(self, row):
        step = row["step"]
        self.threads.add(threading.current_thread())
        self.entered.put(step)
        if step in self._gates:
            self._gates[step].wait()
        if step in self._failing:
            raise OSError(f"no space at {step}\nand more")
        self.steps.append(step)

    def add_video(self, step, path):
        self.videos.append((step, path))

    def announce(self, text):
        raise AssertionError("only rows and videos go through a thread")

    def advance(self, step, eta_s, doing=""):
        raise AssertionError("only rows and videos go through a thread")

    def close(self):
        self.closed = True


def test_tensorboard_shows_values_over_steps_at_the_time_of_their_row(tmp_path):
    write(TensorBoard(tmp_path), row(10, 0.5), row(20, 0.25))
    assert curve(tmp_path, "train/total_loss") == [(10, 1.7e9 + 10, 0.5), (20, 1.7e9 + 20, 0.25)]


def test_tensorboard_shows_what_a_value_means_and_its_unit(tmp_path):
    write(TensorBoard(tmp_path), *[row(step, **{"time/train/update/mean_s": 0.1}) for step in (1, 2)])
    read = EventAccumulator(str(tmp_path)).Reload()
    descriptions = {name: read.SummaryMetadata(name).summary_description for name in read.Tags()["tensors"]}
    assert descriptions == {
        "train/total_loss": "Weighted sum of the losses of world model and Q.",
        "time/train/update/mean_s": "Mean time of a call of the section in the window. Unit: s.",
    }


def test_tensorboard_has_every_row_before_it_is_closed(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write(row(10))
    sink.write(row(20))
    assert steps(tmp_path) == [10, 20]
    sink.close()


def test_tensorboard_takes_numbers_that_are_not_finite(tmp_path):
    write(TensorBoard(tmp_path), row(10, math.nan), row(20, math.inf))
    [(_, _, first), (_, _, second)] = curve(tmp_path, "train/total_loss")
    assert math.isnan(first)
    assert second == math.inf


def test_tensorboard_hides_what_a_resume_writes_again(tmp_path):
    write(TensorBoard(tmp_path), *[row(step, 1.0, **{"train/pi_scale": 2.0}) for step in (10, 20, 30)])
    write(TensorBoard(tmp_path, resume_step=20), row(25, 3.0), row(30, 3.0))
    assert [value for _, _, value in curve(tmp_path, "train/total_loss")] == [1.0, 1.0, 3.0, 3.0]
    assert steps(tmp_path) == [10, 20, 25, 30]
    assert steps(tmp_path, "train/pi_scale") == [10, 20]


def test_tensorboard_without_a_checkpoint_to_go_on_from_hides_nothing(tmp_path):
    write(TensorBoard(tmp_path), row(10))
    write(TensorBoard(tmp_path), row(20))
    assert steps(tmp_path) == [10, 20]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for place in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{place}_DIR", str(tmp_path / place))
    run = tmp_path / "seed-1"
    run.mkdir()
    return run


def open_wandb(run, **config):
    names = {"project": "tdmpc", "group": "walker-walk-default", "name": "seed-1"}
    return WandB(run, **names, config={"seed": 1, **config}, silent=True)


def records(run):
    """Return what W&B stored last: records as its own service would send them."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of the program: its service puts everything on disk, which finishing doesn't await
    [file] = (run / "wandb" / "latest-run").glob("*.wandb")
    content, position, found = file.read_bytes(), 7, []
    while position < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, position)
        assert kind == 1, "a record in pieces; the test has to log less"
        found.append(Record.FromString(content[position + 7 : position + 7 + length]))
        position += 7 + length
    return found


def history(run):
    items = [record.history.item for record in records(run) if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in items]


def of_run(run):
    return next(record.run for record in records(run) if record.HasField("run"))


def test_wandb_offline_keeps_rows_in_the_run_directory(offline):
    write(open_wandb(offline), row(10, 0.5), row(20, 0.25))
    first, second = history(offline)
    assert row(10, 0.5).items() <= first.items()
    assert row(20, 0.25).items() <= second.items()


def test_wandb_knows_the_run_by_group_name_project_and_config(offline):
    write(open_wandb(offline, task="walker-walk", hidden_dims=[2, 3]))
    run = of_run(offline)
    assert (run.project, run.run_group, run.display_name) == ("tdmpc", "walker-walk-default", "seed-1")
    config = {update.key: json.loads(update.value_json) for update in run.config.update if update.key != "_wandb"}
    assert config == {"seed": 1, "task": "walker-walk", "hidden_dims": [2, 3]}


def test_wandb_has_the_step_as_x_axis_of_every_value(offline):
    write(open_wandb(offline))
    metrics = [record.metric for record in records(offline) if record.HasField("metric")]
    assert [(metric.name, metric.glob_name, metric.step_metric) for metric in metrics] == [
        ("step", "", ""),
        ("", "*", "step"),
    ]


def test_wandb_has_a_table_of_what_every_metric_means(offline):
    write(open_wandb(offline), row(1000))
    assert [first["step"] for first in history(offline)] == [1000]
    [file] = (offline / "wandb" / "latest-run").rglob("metrics*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["name", "unit", "over a window", "over workers", "meaning"]
    assert list(cells(declaration("rate/updates_per_s"))) in table["data"]


def test_wandb_id_and_group_survive_a_restart_with_other_steps(offline):
    write(open_wandb(offline, steps=1000), row(10), row(20))
    before = of_run(offline)
    write(open_wandb(offline, steps=2000), row(15))
    after = of_run(offline)
    assert after.run_id == before.run_id == (offline / "wandb_id").read_text()
    assert after.run_group == before.run_group
    assert [row["step"] for row in history(offline)] == [15]


def test_wandb_makes_a_new_id_where_a_kill_left_an_empty_file(offline):
    (offline / "wandb_id").touch()
    write(open_wandb(offline))
    assert of_run(offline).run_id == (offline / "wandb_id").read_text() != ""


def test_two_wandb_runs_of_one_process_stay_apart(offline, tmp_path):
    other = tmp_path / "seed-2"
    other.mkdir()
    first, second = open_wandb(offline), open_wandb(other)
    write(second, row(2))
    write(first, row(1))
    assert [row["step"] for row in history(offline)] == [1]
    assert [row["step"] for row in history(other)] == [2]


def test_wandb_keeps_a_copy_of_a_video_at_its_step(offline, tmp_path):
    video = tmp_path / "10.mp4"
    video.write_bytes(b"moving pictures")
    sink = open_wandb(offline)
    sink.add_video(10, video)
    sink.close()
    [logged] = history(offline)
    assert logged["step"] == 10
    copy = offline / "wandb" / "latest-run" / "files" / logged["eval/video.path"]
    assert copy.read_bytes() == video.read_bytes()


def test_wandb_works_from_a_thread(offline):
    write(Background(open_wandb(offline)), row(10), row(20))
    assert [row["step"] for row in history(offline)] == [10, 20]


def test_a_missing_wandb_is_said_in_one_line_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"pip install wandb") as caught:
        open_wandb(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wandb_that_cannot_start_says_why_in_one_line(offline, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("no such host\nConsider this:\n  and that")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(TrackerError, match=r"^wandb cannot start: no such host \(WANDB_MODE=offline") as caught:
        open_wandb(offline)
    assert "\n" not in str(caught.value)


def test_background_hands_on_every_row_in_order_in_one_thread_of_its_own():
    rows = Rows()
    write(Background(rows), *[row(step) for step in range(50)])
    assert rows.steps == list(range(50))
    assert rows.closed
    [thread] = rows.threads
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_background_keeps_announcements_and_steps_from_its_sink():
    rows = Rows()
    sink = Background(rows)
    sink.announce("evaluating ...")
    sink.advance(1, None)
    sink.close()
    assert rows.closed


def test_background_hands_on_videos(tmp_path):
    rows = Rows()
    sink = Background(rows)
    sink.add_video(10, tmp_path / "10.mp4")
    sink.close()
    assert rows.videos == [(10, tmp_path / "10.mp4")]


def test_a_hanging_sink_holds_up_neither_writing_nor_closing():
    rows = Rows(hanging=[1])
    sink = Background(rows, capacity=2, patience_s=0.01)
    sink.write(row(1))
    assert rows.entered.get() == 1
    sink.write(row(2))
    sink.write(row(3))
    for step in (4, 5):
        with pytest.raises(TrackerError, match="Rows does not keep up: 2 rows wait"):
            sink.write(row(step))
    with pytest.raises(TrackerError, match=r"Rows did not finish within 0.01 s"):
        sink.close()
    assert not rows.closed
    rows.release(1)


def test_a_sink_that_was_slow_misses_only_the_dropped_rows():
    rows = Rows(hanging=[1])
    sink = Background(rows, capacity=1)
    sink.write(row(1))
    assert rows.entered.get() == 1
    sink.write(row(2))
    with pytest.raises(TrackerError):
        sink.write(row(3))
    rows.release(1)
    assert rows.entered.get() == 2
    write(sink, row(4))
    assert rows.steps == [1, 2, 4]


def test_a_failing_sink_is_reported_by_the_next_write_and_gets_the_rows_after():
    rows = Rows(hanging=[1, 3], failing=[2])
    sink = Background(rows)
    for step in (1, 2, 3):
        sink.write(row(step))
    rows.release(1)
    assert [rows.entered.get() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(TrackerError, match=r"Rows failed: OSError: no space at 2$") as caught:
        sink.write(row(4))
    assert isinstance(caught.value.__cause__, OSError)
    rows.release(3)
    write(sink, row(5))
    assert rows.steps == [1, 3, 4, 5]


def test_a_sink_that_fails_at_the_last_row_is_reported_on_closing_and_closed():
    rows = Rows(failing=[1])
    sink = Background(rows)
    sink.write(row(1))
    with pytest.raises(TrackerError, match="Rows failed: OSError: no space at 1"):
        sink.close()
    assert rows.closed


def test_the_recorder_says_once_that_rows_are_dropped():
    rows, said = Rows(hanging=[0]), Announcements()
    recorder = Recorder([said, Background(rows, capacity=1, patience_s=0.01)])
    for step in range(10):
        recorder.write("train", {"step": step, "frames": step, "updates": step, "elapsed_s": 1.0})
    recorder.close()
    assert len(said.texts) == 1
    assert "Rows does not keep up" in said.texts[0]
    rows.release(0)


class Announcements:
    def __init__(self):
        self.texts = []
        self.announce = self.texts.append
        self.write = self.advance = lambda *_: None

    def close(self):
        pass
