import json

import pytest

from tdmpc.training.run_directory import RunDirectoryError, claim, describe


def test_a_used_directory_is_refused_and_nothing_in_it_changes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(RunDirectoryError, match="overwrite=true"), claim(tmp_path, overwrite=False):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_overwriting_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    for name in ("metrics.jsonl", "eval.csv", "notes.txt"):
        (tmp_path / name).write_text("x")
    with claim(tmp_path, overwrite=True):
        assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == ["notes.txt"]


def test_two_runs_never_share_a_directory(tmp_path):
    with (
        claim(tmp_path, overwrite=False),
        pytest.raises(RunDirectoryError, match="another process writes"),
        claim(tmp_path, overwrite=True),
    ):
        pass
    with claim(tmp_path, overwrite=False):
        pass


def test_a_directory_that_cannot_be_written_to_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be written to"), claim(tmp_path / "file/run", overwrite=False):
        pass


def test_what_made_the_run_is_written_down(tmp_path):
    describe(tmp_path, "task: walker-walk\n")
    assert (tmp_path / "config.yaml").read_text() == "task: walker-walk\n"
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["packages"]["torch"]
    assert provenance["command"]
