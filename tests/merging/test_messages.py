import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tdmpc.merging import messages
from tdmpc.merging.messages import (
    FORMAT,
    Folder,
    Header,
    Status,
    Totals,
    UnusableMessage,
    read_header,
    read_message,
    read_note,
    read_statuses,
    write_first_note,
    write_message,
    write_note,
)
from tdmpc.merging.strategies import layout_of

HEADER = Header(worker=1, round=4, step=400, updates=90, recent_return=12.5, group="a")


def state():
    whole = torch.arange(12.0).view(3, 4)
    return {
        "a": whole,
        "a.shared": whole,
        "a.part": whole[:, 1:3],
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3),
    }


LAYOUT = layout_of(state())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "worker-1.round-4.safetensors"
    write_message(path, HEADER, state())
    return path


def test_a_message_comes_back_as_it_was_and_nothing_else_is_left(path):
    header, read = read_message(path, LAYOUT)
    assert header == HEADER == read_header(path)
    assert layout_of(read) == LAYOUT
    assert all(torch.equal(read[name], tensor) for name, tensor in state().items())
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_message_is_an_ordinary_safetensors_file(path):
    assert torch.equal(load_file(path)["half"], state()["half"])


def test_a_message_can_be_read_where_nothing_can_be_written(path):
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        assert read_message(path, LAYOUT)[0] == HEADER
    finally:
        path.parent.chmod(0o755)


def test_a_message_of_that_name_is_replaced_and_its_readers_keep_what_they_opened(path):
    with path.open("rb") as file:
        before = path.read_bytes()
        write_message(path, HEADER, {"a": torch.zeros(1)})
        assert file.read() == before
    assert read_message(path, {"a": "float32 [1]"})[1]["a"].item() == 0


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def truncate_header(path):
    path.write_bytes(path.read_bytes()[:100])


def empty(path):
    path.write_bytes(b"")


def garble(path):
    path.write_bytes(os.urandom(500))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def change_header(path):
    path.write_bytes(path.read_bytes().replace(b'\\"step\\": 400', b'\\"step\\": 500'))


def rename_tensor(path):
    path.write_bytes(path.read_bytes().replace(b'"scalar"', b'"scalaR"'))


def forget_header(path):
    save_file({"a": torch.zeros(1)}, path)


def misspell_header(path):
    save_file({"a": torch.zeros(1)}, path, {"header": json.dumps({"format": FORMAT, "round": 1})})


def put_words_for_numbers(path):
    words = {"worker": "1", "round": "4", "step": "5", "updates": "6", "recent_return": None, "format": FORMAT}
    save_file({"a": torch.zeros(1)}, path, {"header": json.dumps(words), "checksum": "0"})


def age(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "FORMAT", FORMAT + 1)
        write_message(path, HEADER, state())


def ruin(path):
    write_message(path, HEADER, state() | {"half": torch.tensor([1.0, torch.inf], dtype=torch.bfloat16)})


def widen(path):
    write_message(path, HEADER, state() | {"half": torch.ones(3, dtype=torch.bfloat16)})


def delete(path):
    path.unlink()


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "cannot be read"),
        (truncate_header, "cannot be read"),
        (empty, "cannot be read"),
        (garble, "cannot be read"),
        (flip, "checksum"),
        (change_header, "checksum"),
        (rename_tensor, "checksum"),
        (forget_header, "has no header"),
        (misspell_header, "has no header"),
        (put_words_for_numbers, "has no header"),
        (age, f"not of format {FORMAT}"),
        (ruin, "is not finite: half"),
        (widen, r"another model: half is bfloat16 \[3\]"),
        (delete, "is gone"),
        (replace_by_folder, "cannot be read"),
    ],
)
def test_a_message_that_cannot_be_merged_says_why_in_one_line(path, damage, reason):
    damage(path)
    with pytest.raises(UnusableMessage, match=reason) as error:
        read_message(path, LAYOUT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [truncate, garble, forget_header, put_words_for_numbers, age, delete])
def test_damage_that_the_header_shows_is_seen_without_reading_the_tensors(path, damage):
    damage(path)
    with pytest.raises(UnusableMessage):
        read_header(path)


def test_the_header_is_read_without_the_tensors(path):
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    with path.open("r+b") as file:
        file.seek(8 + size)
        file.write(bytes(path.stat().st_size - 8 - size))
    assert read_header(path) == HEADER
    with pytest.raises(UnusableMessage, match="checksum"):
        read_message(path, LAYOUT)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_message_before_and_no_rest(path, monkeypatch, call):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write_message(path, HEADER, {"a": torch.zeros(1)})
    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_what_a_killed_writer_leaves_is_told_by_its_worker(tmp_path, monkeypatch):
    class Kill(BaseException):
        pass

    def die(*args, **kwargs):
        raise Kill

    for worker in (1, 11):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", die)
            patch.setattr(os, "unlink", die)
            with pytest.raises(Kill):
                write_note(tmp_path / f"worker-{worker}.json", worker, {"a": 1})
    parts = Folder(tmp_path).parts(1)
    assert len(parts) == 1
    assert len(list(tmp_path.iterdir())) == 2
    assert Folder(tmp_path).rounds(1) == []
    assert Folder(tmp_path).workers(".json") == []


def test_rounds_are_found_by_number_and_of_one_worker(tmp_path):
    folder = Folder(tmp_path)
    for worker, round in ((1, 10), (1, 9), (11, 3)):
        folder.message(worker, round).touch()
    (tmp_path / "worker-1.round-x.safetensors").touch()
    assert folder.rounds(1) == [9, 10]
    assert folder.rounds(2) == []


@pytest.mark.parametrize("links", [True, False])
def test_of_several_first_notes_one_stays(tmp_path, monkeypatch, links):
    path = tmp_path / "group.json"
    if not links:
        monkeypatch.delattr(os, "link")
        monkeypatch.setattr(os, "link", no_links, raising=False)
    write_first_note(path, 1, {"id": "first"})
    assert read_note(path) == {"id": "first"}
    if links:
        write_first_note(path, 2, {"id": "second"})
        assert read_note(path) == {"id": "first"}
    assert [found.name for found in tmp_path.iterdir()] == ["group.json"]


def no_links(source, target):
    raise PermissionError


def test_totals_of_a_group_can_be_read_by_anyone(tmp_path):
    assert read_statuses(tmp_path / "nothing") == {}
    folder = Folder(tmp_path)
    write_note(folder.group, 0, {"id": "a"})
    totals = [Totals(steps=100, updates=50, merges=2, last_return=1.5, elapsed_s=9.0), Totals(steps=30)]
    for worker, total in enumerate(totals):
        note = {"group": "a", "host": "h", "finished": worker == 1, "totals": vars(total)}
        write_note(folder.note(worker), worker, note)
    write_note(folder.note(2), 2, {"group": "an older one", "host": "h", "finished": True, "totals": {}})
    write_note(folder.note(3), 3, {"unknown": 1})
    folder.note(4).write_text("{")
    assert read_statuses(tmp_path) == {0: Status("a", "h", False, totals[0]), 1: Status("a", "h", True, totals[1])}
