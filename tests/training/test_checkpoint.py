import contextlib
import errno
import json
import os

import pytest
import torch

from tdmpc.training.checkpoint import Checkpoints, load_newest
from tdmpc.training.weights import CheckpointError


def content(value):
    return {"a.pt": {"x": torch.full((3,), float(value))}, "b.json": {"value": value}}


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, keep=2)


def names(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was(checkpoints):
    size = checkpoints.save(40, content(4))
    loaded = checkpoints.load(40)
    assert torch.equal(loaded["a.pt"]["x"], torch.full((3,), 4.0))
    assert loaded["b.json"] == {"value": 4}
    assert size == sum((checkpoints.folder / "40" / name).stat().st_size for name in content(4))
    assert (checkpoints.folder / "latest").read_text() == "40"


def test_only_the_newest_are_kept(checkpoints):
    for step in (5, 40, 100):
        checkpoints.save(step, content(step))
        checkpoints.prune()
    assert names(checkpoints) == ["100", "40", "latest"]
    assert checkpoints.steps() == [40, 100]


def test_one_of_the_same_step_is_replaced(checkpoints):
    checkpoints.save(40, content(1))
    checkpoints.save(40, content(2))
    assert checkpoints.load(40)["b.json"] == {"value": 2}
    assert names(checkpoints) == ["40", "latest"]


def save_killed_at(monkeypatch, call, checkpoints, step, state):
    """Save, and be killed: by an exception that nothing catches, before the n-th call that makes something durable."""
    calls = iter(range(1, 100))
    fsync, rename = os.fsync, os.rename

    def dying(function):
        def wrapped(*args, **kwargs):
            if next(calls) >= call:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dying(fsync))
        patch.setattr(os, "rename", dying(rename))
        patch.setattr(Checkpoints, "_remove_rest", lambda self: None)
        with contextlib.suppress(KeyboardInterrupt):
            checkpoints.save(step, state)


@pytest.mark.parametrize("call", range(1, 9))
def test_a_kill_at_any_moment_leaves_a_checkpoint_whole_or_not_there(checkpoints, monkeypatch, call):
    checkpoints.save(20, content(2))
    save_killed_at(monkeypatch, call, checkpoints, 40, content(4))
    survivor = Checkpoints(checkpoints.folder.parent, keep=2)
    assert survivor.steps() in ([20], [20, 40])
    for step in survivor.steps():
        assert survivor.load(step)["b.json"] == {"value": step // 10}
    survivor.save(60, content(6))
    assert not [name for name in names(survivor) if name.endswith(".part")]
    assert survivor.load(60)["b.json"] == {"value": 6}


@pytest.mark.parametrize("call", range(1, 10))
def test_a_kill_while_one_of_the_same_step_is_replaced_leaves_the_old_one_or_the_new_one(
    checkpoints, monkeypatch, call
):
    checkpoints.save(20, content(2))
    save_killed_at(monkeypatch, call, checkpoints, 20, content(3))
    survivor = Checkpoints(checkpoints.folder.parent, keep=1)
    assert survivor.steps() == [20]
    assert survivor.load(20)["b.json"] in ({"value": 2}, {"value": 3})
    survivor.save(20, content(4))
    assert names(survivor) == ["20", "latest"]
    assert survivor.load(20)["b.json"] == {"value": 4}


def test_a_rename_that_fails_leaves_the_checkpoint_that_was_to_be_replaced(checkpoints, monkeypatch):
    checkpoints.save(20, content(2))
    rename = os.rename

    def failing(source, target):
        if str(target).endswith("/20"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(OSError, match="Input/output"):
            checkpoints.save(20, content(3))
    assert checkpoints.load(20)["b.json"] == {"value": 2}
    checkpoints.save(40, content(4))
    checkpoints.save(60, content(6))
    checkpoints.prune()
    assert names(checkpoints) == ["40", "60", "latest"]


def test_a_broken_one_does_not_push_out_those_that_are_written_after_falling_back(checkpoints):
    for step in (20, 40):
        checkpoints.save(step, content(step))
    damage_by("truncate")(checkpoints.folder / "40")
    load_newest(checkpoints, lambda step, state: None, lambda text: None)
    checkpoints.keep = 1
    checkpoints.save(30, content(3))
    checkpoints.prune()
    assert checkpoints.steps() == [30]


def test_a_full_disk_leaves_the_last_good_one_and_no_rest(checkpoints, monkeypatch):
    checkpoints.save(20, content(2))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(40, content(4))
    assert names(checkpoints) == ["20", "latest"]
    assert checkpoints.load(20)["b.json"] == {"value": 2}


def damage_by(name):
    def truncate(folder):
        path = folder / "a.pt"
        path.write_bytes(path.read_bytes()[:-7])

    def flip(folder):
        path = folder / "a.pt"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def remove(folder):
        (folder / "b.json").unlink()

    def garble(folder):
        (folder / "manifest.json").write_text("{")

    def age(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))

    def hollow(folder):
        (folder / "manifest.json").write_text('{"format": 1}')

    def listify(folder):
        (folder / "manifest.json").write_text("[]")

    functions = (truncate, flip, remove, garble, age, hollow, listify)
    return {function.__name__: function for function in functions}[name]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "garble", "age", "hollow", "listify"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_by_name(checkpoints, damage):
    for step in (20, 40):
        checkpoints.save(step, content(step))
    damage_by(damage)(checkpoints.folder / "40")
    used, warnings = [], []
    assert load_newest(checkpoints, lambda step, state: used.append(state["b.json"]), warnings.append) == 20
    assert used == [{"value": 20}]
    assert len(warnings) == 2
    assert f"checkpoint {checkpoints.folder}/40 is broken" in warnings[0]
    assert warnings[1] == f"the broken checkpoint is kept as {checkpoints.folder}/40.broken"
    assert checkpoints.steps() == [20]
    damage_by(damage)(checkpoints.folder / "20")
    with pytest.raises(CheckpointError, match="is whole"):
        load_newest(checkpoints, lambda step, state: None, warnings.append)


def test_without_checkpoints_there_is_nothing_to_load(checkpoints):
    assert load_newest(checkpoints, lambda step, state: None, print) is None


def test_a_disk_that_fills_up_while_tensors_are_written_is_an_error_of_the_system(checkpoints):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints.save(20, content(2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"a\.pt"):
            checkpoints.save(40, {"a.pt": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(checkpoints) == ["20", "latest"]
