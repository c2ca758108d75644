import json
import math
from contextlib import contextmanager
from pathlib import Path

import pytest

from tdmpc.telemetry.files import EvalCsv, JsonLines
from tdmpc.telemetry.recorder import Recorder


def row(step, kind="train", **values):
    return {"kind": kind, "time": 1.7e9 + step, "step": step, "frames": 2 * step, "updates": step, **values}


def evaluation(step, episode_reward):
    return row(step, "eval", **{"eval/episode_reward": episode_reward})


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path):
    return [row["step"] for row in rows_of(path)]


def write(path, *rows, keep_bytes=None, sink=JsonLines):
    opened = sink(path, keep_bytes)
    for one in rows:
        opened.write(one)
    opened.close()


@contextmanager
def room_for(path, more_bytes):
    """Let the file grow by some bytes only, as on a disk that is nearly full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_row_is_in_the_file_as_soon_as_it_is_written(path):
    sink = JsonLines(path)
    sink.write(row(1))
    assert rows_of(path) == [row(1)]
    sink.close()


def test_rows_of_a_second_start_follow_those_of_the_first(path):
    write(path, row(1))
    write(path, row(2))
    assert rows_of(path) == [row(1), row(2)]


def test_numbers_that_are_not_finite_are_null(path):
    write(path, row(1, a=math.nan, b=math.inf, c=-math.inf, d=0.5))
    [read] = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert read == row(1, a=None, b=None, c=None, d=0.5)


def test_a_last_row_cut_anywhere_by_a_kill_is_removed_and_the_rows_before_it_stay(path):
    write(path, row(1), row(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        write(path, row(3))
        assert rows_of(path) == [row(1), row(3)]


def size_of(*rows):
    return sum(len(json.dumps(one)) + 1 for one in rows)


def test_a_resume_drops_what_came_after_its_checkpoint_also_of_the_same_step(path):
    first = [row(1), evaluation(2, 5.0), row(2)]
    write(path, *first, evaluation(2, 7.0), row(3))
    write(path, row(3, again=True), keep_bytes=size_of(*first))
    assert rows_of(path) == [*first, row(3, again=True)]


def test_the_position_is_where_a_resume_keeps_up_to(path):
    sink = JsonLines(path)
    sink.write(row(1))
    position = sink.position
    sink.write(row(2))
    sink.close()
    write(path, keep_bytes=position)
    assert rows_of(path) == [row(1)]


def test_a_resume_before_the_first_row_drops_all(path):
    write(path, row(1), row(2))
    write(path, keep_bytes=0)
    assert path.read_bytes() == b""


def test_a_resume_keeps_a_file_that_needs_no_repair_as_it_is(path):
    write(path, row(1))
    inode = path.stat().st_ino
    write(path, keep_bytes=size_of(row(1)))
    write(path, keep_bytes=10_000)
    assert path.stat().st_ino == inode


def test_lines_that_are_no_rows_survive_a_resume(path):
    foreign = b'# a note\rof mine\n[1]\n{"step": null}\n\0\0\0\n\n'
    path.write_bytes(foreign + b'{"step": 9}\n')
    write(path, keep_bytes=len(foreign))
    assert path.read_bytes() == foreign


def test_a_kill_during_the_repair_leaves_the_old_file(path, monkeypatch):
    write(path, row(1), row(2))
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            JsonLines(path, keep_bytes=size_of(row(1)))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_a_kill_during_the_repair_left_behind_does_no_harm(path):
    write(path, row(1), row(2))
    path.with_name("metrics.jsonl.tmp").write_bytes(b'{"step": 7')
    write(path, keep_bytes=size_of(row(1)))
    assert rows_of(path) == [row(1)]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("room", [0, 1, 30, len(json.dumps(row(2)))])
def test_rows_that_found_the_disk_full_are_written_once_there_is_room(path, room):
    sink = JsonLines(path)
    sink.write(row(1))
    with room_for(path, room):
        for step in (2, 3):
            with pytest.raises(OSError, match="too large"):
                sink.write(row(step))
            assert rows_of(path) == [row(1)]
    sink.write(row(4))
    assert steps_of(path) == [1, 2, 3, 4]
    sink.close()
    assert steps_of(path) == [1, 2, 3, 4]


def test_closing_writes_the_rows_that_found_the_disk_full(path):
    sink = JsonLines(path)
    with room_for(path, 10), pytest.raises(OSError, match="too large"):
        sink.write(row(1))
    sink.close()
    assert rows_of(path) == [row(1)]


def test_closing_on_a_full_disk_says_so_and_leaves_whole_rows(path):
    sink = JsonLines(path)
    sink.write(row(1))
    with room_for(path, 10):
        with pytest.raises(OSError, match="too large"):
            sink.write(row(2))
        with pytest.raises(OSError, match="too large"):
            sink.close()
    assert rows_of(path) == [row(1)]


@pytest.mark.parametrize("cuts_that_fail", [0, 1])
def test_an_interrupt_in_the_middle_of_a_write_neither_loses_nor_repeats_a_row(path, cuts_that_fail):
    sink = JsonLines(path)
    sink.write(row(1))
    real = sink._lines._file
    sink._lines._file = Interrupted(real, cuts_that_fail)
    with pytest.raises(OSError if cuts_that_fail else KeyboardInterrupt):
        sink.write(row(2))
    sink._lines._file.interrupt = False
    sink.write(row(3))
    sink.close()
    assert rows_of(path) == [row(1), row(2), row(3)]


class Interrupted:
    """A file whose writes are interrupted half-way."""

    def __init__(self, file, cuts_that_fail):
        self._file, self._cuts_that_fail, self.interrupt = file, cuts_that_fail, True
        self.seek, self.close = file.seek, file.close

    def write(self, data):
        if not self.interrupt:
            return self._file.write(data)
        self._file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    def truncate(self, size):
        if self._cuts_that_fail:
            self._cuts_that_fail -= 1
            raise OSError("stale file handle")
        return self._file.truncate(size)


def test_a_full_disk_warns_once_and_training_goes_on(path):
    said = Announcements()
    sink = JsonLines(path)
    recorder = Recorder([said, sink])
    progress = {"step": 1, "frames": 1, "updates": 1, "elapsed_s": 1.0}
    with room_for(path, 0):
        recorder.write("train", progress)
        recorder.write("train", progress | {"step": 2})
    recorder.write("train", progress | {"step": 3})
    recorder.close()
    assert len(said.texts) == 1
    assert "JsonLines failed" in said.texts[0]
    assert steps_of(path) == [1, 2, 3]


class Announcements:
    def __init__(self):
        self.texts = []
        self.announce = self.texts.append
        self.write = self.advance = lambda *_: None

    def close(self):
        pass


def test_eval_csv_has_the_published_columns_and_only_evaluations(tmp_path):
    path = tmp_path / "eval.csv"
    write(path, row(1000), evaluation(2000, 812.25), sink=EvalCsv)
    write(path, evaluation(4000, 900.5), sink=EvalCsv)
    assert path.read_text() == "step,episode_reward\n2000,812.25\n4000,900.5\n"


def test_eval_csv_has_no_line_for_an_evaluation_without_a_return(tmp_path):
    path = tmp_path / "eval.csv"
    write(path, row(1000, "eval"), sink=EvalCsv)
    assert path.read_text() == "step,episode_reward\n"


def test_eval_csv_drops_what_a_resume_evaluates_again_and_keeps_its_header(tmp_path):
    path = tmp_path / "eval.csv"
    write(path, evaluation(0, 1.0), evaluation(2000, 812.25), evaluation(4000, 900.5), sink=EvalCsv)
    write(path, evaluation(4000, 900.0), keep_bytes=len("step,episode_reward\n0,1.0\n2000,812.25\n"), sink=EvalCsv)
    assert path.read_text() == "step,episode_reward\n0,1.0\n2000,812.25\n4000,900.0\n"


@pytest.mark.parametrize("left", ["step,epi", "step,episode_reward", "step,episode_reward\n20", ""])
def test_eval_csv_torn_by_a_kill_has_its_header_once(tmp_path, left):
    path = tmp_path / "eval.csv"
    path.write_text(left)
    write(path, evaluation(2000, 812.25), sink=EvalCsv)
    assert path.read_text() == "step,episode_reward\n2000,812.25\n"
