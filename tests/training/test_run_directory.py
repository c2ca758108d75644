import json
import os

import pytest

from tdmpc.training.run_directory import RunDirectoryError, claim, describe, forget, refuse_used


def test_a_used_directory_is_refused_and_nothing_in_it_changes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(RunDirectoryError, match="overwrite=true"):
        refuse_used(tmp_path, overwrite=False)
    refuse_used(tmp_path, overwrite=True)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_forgetting_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    for name in ("metrics.jsonl", "eval.csv", "notes.txt"):
        (tmp_path / name).write_text("x")
    forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_runs_never_share_a_directory(tmp_path):
    with (
        claim(tmp_path),
        pytest.raises(RunDirectoryError, match=rf"another process writes this run \(process {os.getpid()} on"),
        claim(tmp_path),
    ):
        pass
    with claim(tmp_path):
        pass


def test_a_directory_that_cannot_be_written_to_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be written to"), claim(tmp_path / "file/run"):
        pass


def test_an_error_while_it_is_held_is_not_mistaken_for_one_of_the_directory(tmp_path):
    with pytest.raises(PermissionError), claim(tmp_path):
        raise PermissionError


def test_what_made_the_run_is_written_down(tmp_path):
    describe(tmp_path, "task: walker-walk\n")
    assert (tmp_path / "config.yaml").read_text() == "task: walker-walk\n"
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["packages"]["torch"]
    assert provenance["command"]
