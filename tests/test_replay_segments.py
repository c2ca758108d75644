"""Saved and restored replays against twins that were never saved, and folders as a kill would leave them."""

import contextlib
import copy
import errno
import itertools
import json
import os
import shutil

import numpy as np
import pytest
import torch

from tdmpc import replay_segments
from tdmpc.replay import EmptyReplayError, ReplayBuffer
from tdmpc.replay_segments import MAX_LOOSE, ReplaySegmentError, ReplaySegments, Spans

OBSERVATION_SIZE, ACTION_SIZE = 3, 2
ROW_BYTES = 4 * (OBSERVATION_SIZE + ACTION_SIZE + 1) + 1 + 4  # with termination and timestep


def make_buffer(num_envs=2, ring_size=12, horizon=1, seed=0, device="cpu"):
    return ReplayBuffer(
        num_envs=num_envs,
        capacity=num_envs * ring_size,
        observation_size=OBSERVATION_SIZE,
        action_size=ACTION_SIZE,
        horizon=horizon,
        rng=np.random.default_rng(seed),
        device=device,
    )


class Player:
    """Plays random numbers into buffers, the same into each."""

    def __init__(self, num_envs=2, seed=0):
        self.num_envs = num_envs
        self.rng = np.random.default_rng(seed)

    def numbers(self, *shape):
        return self.rng.standard_normal((self.num_envs, *shape)).astype(np.float32)

    def some(self, of=True, share=0.5):
        return (self.rng.random(self.num_envs) < share) & of

    def everyone(self):
        return np.ones(self.num_envs, dtype=bool)

    def begin(self, *buffers, mask=None):
        mask = self.everyone() if mask is None else mask
        obs = self.numbers(OBSERVATION_SIZE)
        for buffer in buffers:
            buffer.begin(obs, mask)

    def add(self, *buffers, mask=None, terminated=0.0):
        row = self.numbers(ACTION_SIZE), self.numbers(), self.numbers(OBSERVATION_SIZE), self.some(share=terminated)
        for buffer in buffers:
            buffer.add(*row, mask)

    def discard(self, *buffers, mask=None):
        for buffer in buffers:
            buffer.discard(self.everyone() if mask is None else mask)

    def episode(self, *buffers, steps, mask=None):
        self.begin(*buffers, mask=mask)
        for _ in range(steps):
            self.add(*buffers, mask=mask)

    def play(self, *buffers, calls, terminated=0.05, discards=0.05):
        """Move random environments; the episodes have lengths of all kinds."""
        for _ in range(calls):
            running = np.array(buffers[0].state_dict()["running"])
            if self.rng.random() < discards:
                self.discard(*buffers, mask=self.some(running))
            elif self.rng.random() < 0.2:
                self.begin(*buffers, mask=self.some(~running | (self.rng.random() < 0.2)))
            else:
                self.add(*buffers, mask=self.some(running, share=0.8), terminated=terminated)


def content(buffer):
    """Everything that a buffer knows, row by row."""
    rows = buffer.read(*Spans(*buffer.held()).rows())
    return buffer.state_dict() | {name: column.tolist() for name, column in rows.items()}


def batches(buffer):
    """What the buffer would sample, sampled from a copy."""
    buffer, drawn = copy.deepcopy(buffer), []
    with contextlib.suppress(EmptyReplayError):
        drawn = [buffer.sample(size).to_dict() for size in (1, 3, 50)]
    return [{name: column.tolist() for name, column in batch.items()} for batch in drawn]


def assert_same(buffer, twin):
    assert content(buffer) == content(twin)
    assert batches(buffer) == batches(twin)


def as_json(saved):
    return json.loads(json.dumps(saved.index))


def files(folder):
    return {path.name for path in folder.iterdir()}


def listed(index):
    return {entry["file"] for entry in index["segments"]}


def num_rows(entry):
    return sum(entry["until"]) - sum(entry["first"])


def restored(folder, index, **size):
    buffer = make_buffer(seed=99, **size)
    ReplaySegments(folder, buffer).restore(index)
    return buffer


@pytest.fixture(autouse=True)
def _instant_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("seed", range(16))
def test_every_kept_checkpoint_restores_what_its_twin_was(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    num_envs, ring_size = int(rng.integers(1, 5)), int(rng.integers(2, 25))
    segment_bytes = int(rng.choice([2, 9, 40, 400])) * ROW_BYTES
    monkeypatch.setattr(replay_segments, "MAX_LOOSE", int(rng.choice([0, 1, 3, 16])))
    terminated, discards = rng.choice([0, 0.02, 0.3]), rng.choice([0, 0.05, 0.3])
    size = {"num_envs": num_envs, "ring_size": ring_size}
    buffer, twin = make_buffer(**size), make_buffer(**size)
    player, store = Player(num_envs, seed), ReplaySegments(tmp_path, buffer, segment_bytes)
    kept = []

    for _ in range(25):
        player.play(
            buffer,
            twin,
            calls=int(rng.choice([0, 1, 5, 3 * ring_size])),
            terminated=terminated,
            discards=discards,
        )
        assert_same(buffer, twin)
        index = as_json(store.save())
        if rng.random() < 0.8:  # else its checkpoint was never completed
            kept = [*kept[-2:], (index, copy.deepcopy(twin))]
            store.prune(index for index, _ in kept)
            if kept == [(index, twin)]:
                assert files(tmp_path) == listed(index)
        for index, past in kept:
            assert_same(restored(tmp_path, index, **size), past)
        if kept and rng.random() < 0.3:  # killed; the newest checkpoints may be broken
            kept = kept[: int(rng.integers(1, len(kept) + 1))]
            buffer, twin = make_buffer(seed=99, **size), copy.deepcopy(kept[-1][1])
            store = ReplaySegments(tmp_path, buffer, segment_bytes)
            store.restore(kept[-1][0])


@pytest.mark.parametrize("regrown", [0, 2, 5, 7, 30])
@pytest.mark.parametrize("steps", [0, 3, 11, 40])
def test_saved_rows_that_were_discarded_give_way_to_those_written_over_them(tmp_path, steps, regrown):
    buffer, twin, player = make_buffer(), make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, twin, steps=4)
    store.save()
    player.episode(buffer, twin, steps=steps)
    store.save()
    player.discard(buffer, twin, mask=np.array([False, True]))
    for _ in range(regrown):
        player.begin(buffer, twin, mask=np.array([False, True]))
    assert_same(restored(tmp_path, store.save().index), twin)


def test_save_between_discard_and_the_rows_written_over_it_forgets_neither(tmp_path):
    buffer, twin, player = make_buffer(), make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, twin, steps=5)
    before = store.save().index, copy.deepcopy(twin)
    player.discard(buffer, twin)
    empty = store.save().index, copy.deepcopy(twin)
    player.episode(buffer, twin, steps=3)
    after = store.save().index, twin
    for index, past in (before, empty, after):
        assert_same(restored(tmp_path, index), past)


def test_discard_of_an_episode_longer_than_the_ring(tmp_path):
    buffer, twin, player = make_buffer(num_envs=1), make_buffer(num_envs=1), Player(1)
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, twin, steps=30)
    store.save()
    player.discard(buffer, twin)
    player.episode(buffer, twin, steps=2)
    assert_same(restored(tmp_path, store.save().index, num_envs=1), twin)


def test_restored_buffer_goes_on_like_one_never_saved(tmp_path):
    buffer, twin, player = make_buffer(), make_buffer(), Player()
    for calls in (30, 60, 1, 300):
        player.play(buffer, twin, calls=calls)
        assert_same(buffer, twin)
        store = ReplaySegments(tmp_path, buffer)
        index = as_json(store.save())
        buffer = restored(tmp_path, index)
        for each in (buffer, twin):
            for _ in range(3):
                each.sample(4)


def test_rows_written_more_often_than_the_ring_holds_are_saved_once(tmp_path):
    buffer, player = make_buffer(ring_size=200), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=1000)
    assert store.save().bytes_written < 400 * ROW_BYTES + 4000


def test_save_writes_the_new_rows_alone(tmp_path):
    buffer, player = make_buffer(ring_size=4000), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=3000)
    assert store.save().bytes_written > 6000 * ROW_BYTES
    for steps in (0, 10, 200):
        player.episode(buffer, steps=steps)
        before = files(tmp_path)
        saved = store.save()
        new = files(tmp_path) - before
        assert saved.bytes_written == sum((tmp_path / name).stat().st_size for name in new)
        rows = 2 * (steps + 1)
        assert rows * ROW_BYTES < saved.bytes_written < rows * ROW_BYTES + 4000  # of the file format
    assert store.save().bytes_written == 0
    assert store.save().index["segments"] == saved.index["segments"]


def test_no_segment_is_larger_than_told(tmp_path):
    buffer, player = make_buffer(num_envs=3, ring_size=1000), Player(3)
    store = ReplaySegments(tmp_path, buffer, segment_bytes=100 * ROW_BYTES)
    player.episode(buffer, steps=700)
    index = store.save().index
    assert len(index["segments"]) == 22
    assert max(map(num_rows, index["segments"])) <= 103
    assert_same(restored(tmp_path, index, num_envs=3, ring_size=1000), buffer)


def assert_few_segments(index, buffer, max_rows):
    large, small = 8 * len(buffer) / max_rows, MAX_LOOSE + np.log2(max_rows)
    assert len(index["segments"]) <= large + small


def test_many_small_saves_leave_few_segments_and_write_each_row_a_few_times(tmp_path):
    buffer, player, max_rows, num_saves = make_buffer(num_envs=1, ring_size=500), Player(1), 100, 1500
    store = ReplaySegments(tmp_path, buffer, segment_bytes=max_rows * ROW_BYTES)
    player.begin(buffer)
    rows_written, newest = {}, None
    for _ in range(num_saves):
        player.add(buffer)
        newest = store.save().index
        store.prune([newest])
        rows_written |= {entry["file"]: num_rows(entry) for entry in newest["segments"]}
        assert files(tmp_path) == listed(newest)
        assert_few_segments(newest, buffer, max_rows)
    assert sum(rows_written.values()) < num_saves * np.log2(max_rows)
    assert_same(restored(tmp_path, newest, num_envs=1, ring_size=500), buffer)


@pytest.mark.parametrize("pattern", [[75, 1, 1, 1], [1, 1, 1, 24], [30, 29, 15, 14, 2, 1], [60], [24], [26]])
def test_saves_of_any_sizes_leave_few_segments(tmp_path, pattern):
    buffer, player, max_rows = make_buffer(num_envs=1, ring_size=500), Player(1), 100
    store = ReplaySegments(tmp_path, buffer, segment_bytes=max_rows * ROW_BYTES)
    for rows in pattern * (1500 // sum(pattern)):
        player.episode(buffer, steps=rows - 1)
        saved = store.save()
        assert_few_segments(saved.index, buffer, max_rows)
    assert_same(restored(tmp_path, saved.index, num_envs=1, ring_size=500), buffer)


def test_environments_of_unequal_pace_do_not_hoard_dead_rows(tmp_path):
    buffer, twin, player = make_buffer(ring_size=50), make_buffer(ring_size=50), Player()
    store = ReplaySegments(tmp_path, buffer, segment_bytes=20 * ROW_BYTES)
    for _ in range(60):
        player.episode(buffer, twin, steps=20, mask=np.array([True, False]))
        player.begin(buffer, twin, mask=np.array([False, True]))
        index = store.save().index
        store.prune([index])
        assert sum(map(num_rows, index["segments"])) <= 2 * len(buffer)
    assert_same(restored(tmp_path, index, ring_size=50), twin)


def test_prune_deletes_what_no_kept_checkpoint_needs(tmp_path):
    buffer, player = make_buffer(ring_size=10), Player()
    store = ReplaySegments(tmp_path, buffer)
    past = []
    for _ in range(8):
        player.episode(buffer, steps=3)
        past.append((store.save().index, copy.deepcopy(buffer)))
    assert len(files(tmp_path)) == 8
    kept = [past[3], past[-1]]
    store.prune(index for index, _ in kept)
    assert files(tmp_path) == listed(kept[0][0]) | listed(kept[1][0])
    assert len(files(tmp_path)) == 6
    for index, twin in kept:
        assert_same(restored(tmp_path, index, ring_size=10), twin)


def test_prune_spares_the_last_save_though_its_checkpoint_failed(tmp_path):
    buffer, player = make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=2)
    first = store.save().index
    player.episode(buffer, steps=2)
    store.save()
    store.prune([first])
    player.episode(buffer, steps=2)
    index = store.save().index
    store.prune([first, index])
    assert_same(restored(tmp_path, index), buffer)


def test_files_of_others_are_left_alone(tmp_path):
    buffer, player = make_buffer(), Player()
    (tmp_path / "segment-000001 (copy).pt").write_text("mine")
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=2)
    index = store.save().index
    store.prune([index])
    assert files(tmp_path) == listed(index) | {"segment-000001 (copy).pt"}


def test_orphans_of_a_killed_run_are_neither_used_nor_overwritten_and_go_at_prune(tmp_path):
    buffer, player = make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=2)
    first, twin = store.save().index, copy.deepcopy(buffer)
    player.episode(buffer, steps=3)
    (orphan,) = listed(store.save().index) - listed(first)
    before = (tmp_path / orphan).read_bytes()

    buffer = make_buffer()
    store = ReplaySegments(tmp_path, buffer)
    store.restore(first)
    assert_same(buffer, twin)
    player.episode(buffer, steps=4)
    second = store.save().index
    assert (tmp_path / orphan).read_bytes() == before
    assert orphan not in listed(second)
    store.prune([first, second])
    assert files(tmp_path) == listed(second)
    assert_same(restored(tmp_path, second), buffer)


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    """Copies of `tmp_path / replay` before and after every step of a save that touches the disk."""
    taken, names = [], (tmp_path / f"snapshot-{number}" for number in itertools.count())

    def watch(step):
        def watched(*args, **kwargs):
            take()
            result = step(*args, **kwargs)
            take()
            return result

        return watched

    def take():
        taken.append(next(names))
        shutil.copytree(tmp_path / "replay", taken[-1])

    monkeypatch.setattr(os, "fsync", watch(os.fsync))
    monkeypatch.setattr(os, "replace", watch(os.replace))
    monkeypatch.setattr(os, "unlink", watch(os.unlink))
    return taken


def test_killed_at_any_moment_of_a_save_the_checkpoint_before_restores_and_goes_on(tmp_path, snapshots):
    buffer, player, folder = make_buffer(ring_size=40), Player(), tmp_path / "replay"
    store = ReplaySegments(folder, buffer, segment_bytes=40 * ROW_BYTES)
    for steps in (3, 2, 3):
        player.episode(buffer, steps=steps)
        first = store.save().index
        store.prune([first])
    twin = copy.deepcopy(buffer)
    player.discard(buffer)
    player.episode(buffer, steps=30)
    snapshots.clear()
    second, final = store.save().index, copy.deepcopy(buffer)
    store.prune([first, second])  # the caller has completed its checkpoint
    at_kill = list(snapshots)
    store.prune([second])
    after_completion = snapshots[len(at_kill) :]
    assert len(listed(second)) > 1
    assert not listed(second) & listed(first)  # it merged them
    assert len(at_kill) > 8
    assert len(after_completion) == 6

    for folder in at_kill:
        buffer, past = make_buffer(ring_size=40), copy.deepcopy(twin)
        store = ReplaySegments(folder, buffer)
        store.restore(first)
        assert_same(buffer, past)
        Player(seed=7).play(buffer, past, calls=30)
        index = store.save().index
        store.prune([index])
        assert files(folder) == listed(index)
        assert_same(restored(folder, index, ring_size=40), past)
    for folder in after_completion:
        assert_same(restored(folder, second, ring_size=40), final)


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("call", [0, 1, 2])
def test_failed_save_leaves_nothing_and_the_next_one_makes_up_for_it(tmp_path, monkeypatch, name, call):
    buffer, player = make_buffer(ring_size=40), Player()
    store = ReplaySegments(tmp_path, buffer, segment_bytes=20 * ROW_BYTES)
    player.episode(buffer, steps=4)
    first, twin = store.save().index, copy.deepcopy(buffer)
    player.discard(buffer)
    player.episode(buffer, steps=30)
    before, step, calls = files(tmp_path), getattr(os, name), itertools.count()

    def fail(*args, **kwargs):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(OSError, match="No space left"):
            store.save()
    assert files(tmp_path) == before
    assert_same(restored(tmp_path, first, ring_size=40), twin)
    player.add(buffer)
    assert_same(restored(tmp_path, store.save().index, ring_size=40), buffer)


def test_full_disk_is_told_as_such(tmp_path, monkeypatch):
    buffer = make_buffer()
    Player().episode(buffer, steps=4)
    store = ReplaySegments(tmp_path, buffer)
    (tmp_path / "segment-000001.part").symlink_to("/dev/full")
    monkeypatch.setattr(store, "_remove_leftovers", lambda: None)
    with pytest.raises(OSError, match="No space left"):
        store.save()


def test_leftover_of_a_killed_save_goes_at_the_next(tmp_path):
    (tmp_path / "segment-000007.part").write_bytes(b"half a segm")
    buffer = make_buffer()
    Player().episode(buffer, steps=4)
    assert files(tmp_path) == {"segment-000007.part"}
    index = ReplaySegments(tmp_path, buffer).save().index
    assert files(tmp_path) == listed(index)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def make_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (os.remove, "is missing"),
        (truncate, r"has \d+ bytes instead of \d+"),
        (empty, r"has 0 bytes instead of \d+"),
        (flip_a_bit, "is damaged"),
        (make_directory, "cannot be read"),
    ],
)
def test_spoiled_segment_is_named_and_the_checkpoint_before_restores(tmp_path, spoil, problem):
    buffer, player = make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=2)
    first, twin = store.save().index, copy.deepcopy(buffer)
    player.episode(buffer, steps=3)
    second = store.save().index
    (newest,) = listed(second) - listed(first)
    spoil(tmp_path / newest)

    buffer = make_buffer(seed=5)
    store, before = ReplaySegments(tmp_path, buffer), content(buffer)
    with pytest.raises(ReplaySegmentError, match=f"^{tmp_path / newest} {problem}"):
        store.restore(second)
    assert content(buffer) == before
    store.restore(first)
    assert_same(buffer, twin)


def test_segments_load_without_unpickling_and_the_index_is_json(tmp_path):
    buffer = make_buffer()
    Player().episode(buffer, steps=4)
    index = ReplaySegments(tmp_path, buffer).save().index
    assert json.loads(json.dumps(index)) == index
    for path in tmp_path.iterdir():
        columns = torch.load(path, weights_only=True)
        assert {name: tuple(column.shape) for name, column in columns.items()} == {
            "obs": (10, 3),
            "action": (10, 2),
            "reward": (10,),
            "terminated": (10,),
            "timestep": (10,),
        }


def test_new_folder_gets_all_rows_though_they_were_saved_elsewhere(tmp_path):
    buffer, player = make_buffer(), Player()
    player.episode(buffer, steps=8)
    old = ReplaySegments(tmp_path / "old", buffer).save().index
    buffer = restored(tmp_path / "old", old)
    store = ReplaySegments(tmp_path / "new", buffer)
    store.save()
    player.add(buffer)
    index = store.save().index
    shutil.rmtree(tmp_path / "old")
    assert_same(restored(tmp_path / "new", index), buffer)


def test_buffer_of_another_capacity_takes_the_newest_rows_that_fit(tmp_path):
    buffer, player = make_buffer(ring_size=12), Player()
    store = ReplaySegments(tmp_path, buffer)
    player.episode(buffer, steps=30)
    player.episode(buffer, steps=2)
    store.save()
    player.discard(buffer)  # its rows remain in the segment, and would come upon kept ones in the smaller ring
    index = store.save().index
    small, large = restored(tmp_path, index, ring_size=5), restored(tmp_path, index, ring_size=50)
    assert content(large) == content(buffer)
    assert len(small) == 10
    rows = Spans(*small.held()).rows()
    for name, column in small.read(*rows).items():
        assert torch.equal(column, buffer.read(*rows)[name])
    player.episode(small, steps=1)
    saved = ReplaySegments(tmp_path / "small", small).save()
    assert_same(restored(tmp_path / "small", saved.index, ring_size=5), small)


def test_another_number_of_environments_is_refused_by_key(tmp_path):
    buffer = make_buffer()
    Player().episode(buffer, steps=4)
    index = ReplaySegments(tmp_path, buffer).save().index
    other = make_buffer(num_envs=3)
    before = content(other)
    with pytest.raises(ValueError, match=r"^num_envs=3: the replay was saved with 2$"):
        ReplaySegments(tmp_path, other).restore(index)
    assert content(other) == before


def test_empty_buffer_is_saved_and_restored(tmp_path):
    saved = ReplaySegments(tmp_path, make_buffer()).save()
    assert (saved.bytes_written, saved.index["segments"]) == (0, [])
    assert_same(restored(tmp_path, saved.index), make_buffer())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu_restore_on_the_cpu_and_back(tmp_path):
    buffer, twin, player = make_buffer(device="cuda"), make_buffer(), Player()
    store = ReplaySegments(tmp_path, buffer)
    for _ in range(5):
        player.play(buffer, twin, calls=10)
        index = store.save().index
    assert_same(restored(tmp_path, index), twin)
    assert content(restored(tmp_path, index, device="cuda")) == content(twin)
