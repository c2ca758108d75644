"""A run that is stopped and continued ends with the same bits as one never stopped."""

import errno
import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch

from tdmpc import runs
from tdmpc.config import TrainConfig, run_directory
from tdmpc.keys import ConfigError
from tdmpc.training.checkpoint import Checkpoints
from tdmpc.training.progress import Phase
from tdmpc.training.run_directory import RunDirectoryError
from tdmpc.training.trainer import UnsavedError
from tests.training.builders import TINY

PHASES = [f"progress/{phase.value}_s" for phase in Phase]
TIMES = ("time", "elapsed_s", "eval/duration_s", "progress/eta_s", "save/bytes", *PHASES)


class Outcome:
    """A trainer after its run, what it printed, and the code it ended with."""

    def __init__(self, trainer, text, code):
        self.trainer, self.text, self.code = trainer, text, code


def train(monkeypatch, root, *, stop_at=None, stop_when=None, task="gym:tests.toys:ToyRepeatable-v0", **keys):
    """Run a whole command in this process, stopping it at a step as a signal would."""
    defaults = {
        "num_envs": 3, "steps_per_update": 4, "episodic": True, "vector": "sync", "seed_steps": 40, "steps": 240,
        "eval_freq": 50, "eval_episodes": 2, "log_freq": 30, "run_root": str(root),
    }  # fmt: skip
    config = TrainConfig(task=task, **{**TINY, **defaults, **keys})
    built = []

    def build(*args, should_stop, **kwargs):
        trainer = real_build(*args, should_stop=should_stop, **kwargs)
        if stop_when is not None:
            trainer.should_stop = lambda: stop_when(trainer)
        else:
            trainer.should_stop = lambda: stop_at is not None and trainer.step >= stop_at
        built.append(trainer)
        return trainer

    real_build, text, code = runs.build_trainer, StringIO(), 0
    with monkeypatch.context() as patch, redirect_stdout(text), redirect_stderr(text):
        patch.setattr(runs, "build_trainer", build)
        patch.setattr("sys.stdout", text)
        patch.setattr(runs.Console.__init__, "__defaults__", (text,))
        try:
            runs.train(config)
        except SystemExit as error:
            code = error.code
    return Outcome(built[0] if built else None, text.getvalue(), code)


def run_of(root, task="gym-tests.toys-ToyRepeatable-v0"):
    return run_directory(TrainConfig(task=task, run_root=str(root)))


def rows_of(root, **keys):
    """Return the rows of a run without what depends on time, and without the parts of windows that do."""
    lines = (run_of(root, **keys) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    timed = ("time/", "rate/", "system/")
    return [{k: v for k, v in row.items() if k not in TIMES and not k.startswith(timed)} for row in rows]


def flat(value, prefix=""):
    """Return the leaves of nested containers by path."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    return {path: leaf for key, item in items for path, leaf in flat(item, f"{prefix}/{key}").items()}


def state_of(trainer):
    """Return all that must be equal: weights, optimisers, streams, schedules, episodes, counts and replay rows."""
    replay = trainer.replay
    alive = [
        {name: column[env, position].clone() for name, column in replay._rows.view(-1, replay._ring_size).items()}
        for env in range(len(replay._filled))
        for position in (replay._cursor[env] - replay._filled[env] + range(replay._filled[env])) % replay._ring_size
    ]
    trainer.recorder.positions = dict  # the files are closed by now, and compared elsewhere
    state = trainer.state_dict()
    for name in ("timers", "progress"):
        del state[name]
    del state["recorder"]["positions"]
    state["recorder"]["window"].pop("save/bytes", None)
    cursors = [replay._cursor.tolist(), replay._filled.tolist(), replay._running.tolist()]
    streams = replay._rng.bit_generator.state
    agent = [trainer.agent.weights(), trainer.agent.state_dict()]
    return flat([state, agent, alive, cursors, streams, vars(trainer.progress.total)])


def assert_same(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        same = torch.equal(value, other[path]) if isinstance(value, torch.Tensor) else value == other[path]
        assert same, path


def assert_continues_exactly(monkeypatch, tmp_path, stops, **keys):
    unbroken = train(monkeypatch, tmp_path / "unbroken", **keys)
    assert unbroken.code == 0
    for stop_at in stops:
        stopped = train(monkeypatch, tmp_path / "broken", stop_at=stop_at, **keys)
        assert "the same command continues" in stopped.text
    broken = train(monkeypatch, tmp_path / "broken", **keys)
    assert "continuing" in broken.text
    assert broken.code == 0
    assert_same(state_of(unbroken.trainer), state_of(broken.trainer))
    task = keys.get("task", "gym-tests.toys-ToyRepeatable-v0")
    assert rows_of(tmp_path / "unbroken", task=task) == rows_of(tmp_path / "broken", task=task)
    files = [run_of(tmp_path / name, task) / "eval.csv" for name in ("unbroken", "broken")]
    assert files[0].read_text() == files[1].read_text()
    assert not list((tmp_path / "broken").rglob("*.part"))


# In the seeding phase; where it ends; between pretraining and training; where an evaluation is due; in the middle of
# everything; and three times in a row.
@pytest.mark.parametrize("stops", [[21], [42], [45], [150], [123], [30, 99, 201]])
def test_a_stopped_run_ends_with_the_same_bits(monkeypatch, tmp_path, stops):
    assert_continues_exactly(monkeypatch, tmp_path, stops)


def test_a_stop_in_the_middle_of_pretraining_does_not_wait_for_its_end(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    train(monkeypatch, tmp_path / "b", stop_when=lambda trainer: trainer.progress.total.updates == 4)
    stopped = train(monkeypatch, tmp_path / "b", stop_when=lambda trainer: trainer.progress.total.updates == 7)
    assert "stopped by request after 42 steps" in stopped.text
    continued = train(monkeypatch, tmp_path / "b")
    assert "pretraining: 3 updates on 42 random steps" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


@pytest.mark.parametrize("point", [0, 51, 240])
def test_a_stop_in_the_middle_of_an_evaluation_abandons_it_and_it_is_made_afterwards(monkeypatch, tmp_path, point):
    unbroken = train(monkeypatch, tmp_path / "a")
    evaluating = lambda trainer: trainer.step == point and trainer.progress._phase == Phase.EVALUATION  # noqa: E731
    stopped = train(monkeypatch, tmp_path / "b", stop_when=evaluating)
    assert f"stopped by request after {point} steps" in stopped.text
    assert point not in [row["step"] for row in rows_of(tmp_path / "b") if row["kind"] == "eval"]
    continued = train(monkeypatch, tmp_path / "b")
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_also_with_environments_in_processes(monkeypatch, tmp_path):
    assert_continues_exactly(monkeypatch, tmp_path, [123], vector="async")


def test_also_on_dmcontrol(monkeypatch, tmp_path):
    keys = {"task": "cartpole-swingup", "episodic": False, "steps": 150, "eval_freq": 10**6, "eval_episodes": 1}
    assert_continues_exactly(monkeypatch, tmp_path, [99], **keys)


def test_also_with_episodes_longer_than_their_ring_of_the_replay(monkeypatch, tmp_path):
    keys = {"env": {"min_length": 15, "max_length": 30}, "buffer_size": 36}
    assert_continues_exactly(monkeypatch, tmp_path, [123, 150], **keys)


def test_saving_often_changes_nothing(monkeypatch, tmp_path):
    rarely = train(monkeypatch, tmp_path / "a")
    often = train(monkeypatch, tmp_path / "b", save_freq=9)
    assert_same(state_of(rarely.trainer), state_of(often.trainer))
    assert len(list((run_of(tmp_path / "b") / "checkpoints").glob("*/manifest.json"))) == 2


def test_a_broken_newest_checkpoint_falls_back_to_the_one_before_by_name(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    train(monkeypatch, tmp_path / "b", stop_at=150, save_freq=60)
    newest = run_of(tmp_path / "b") / "checkpoints/150/trainer.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    continued = train(monkeypatch, tmp_path / "b", save_freq=60)
    assert "checkpoints/150 is broken (trainer.pt is not what was written); trying the one before" in continued.text
    assert "from step 120" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_an_environment_with_randomness_of_its_own_loses_the_rest_of_its_episode_and_no_more(monkeypatch, tmp_path):
    task = "gym:tests.toys:ToyForgetful-v0"
    train(monkeypatch, tmp_path, stop_at=123, task=task)
    continued = train(monkeypatch, tmp_path, task=task)
    assert continued.code == 0
    assert "has randomness of its own" in continued.text
    assert continued.trainer.step == 240


def test_a_finished_run_says_so_and_goes_on_when_steps_are_raised(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path, steps=120)
    again = train(monkeypatch, tmp_path, steps=120)
    assert again.trainer is None
    assert "finished at step 120" in again.text
    further = train(monkeypatch, tmp_path, steps=180)
    assert "changed: steps=180 (was 120)" in further.text
    assert "from step 120" in further.text
    assert further.trainer.step == 180
    assert [row["step"] for row in rows_of(tmp_path) if row["kind"] == "eval"] == [0, 51, 102, 120, 150, 180]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latent_dim", 24),
        ("num_envs", 2),
        ("seed_steps", 60),
        ("env", {"max_length": 9}),
        ("horizon", 2),
        ("checkpoint", "agent.pt"),
    ],
)
def test_a_key_that_cannot_change_is_refused_by_name(monkeypatch, tmp_path, key, value):
    train(monkeypatch, tmp_path, stop_at=60)
    with pytest.raises(ConfigError, match=f"^{key}=.*was started with.*cannot change"):
        train(monkeypatch, tmp_path, **{key: value})


def test_a_changed_learning_rate_is_the_one_that_counts(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path, stop_at=60)
    continued = train(monkeypatch, tmp_path, steps=90, lr=1e-2, enc_lr_scale=0.5)
    assert "changed: lr=0.01 (was 0.0003)" in continued.text
    learner = continued.trainer.agent.learner
    groups = [*learner.optimizer.param_groups, *learner.policy_optimizer.param_groups]
    assert [group["lr"] for group in groups] == [0.005, 0.01, 0.01]


def test_never_resuming_refuses_a_used_directory(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path, stop_at=60)
    with pytest.raises(RunDirectoryError, match="holds a run"):
        train(monkeypatch, tmp_path, resume="never")
    anew = train(monkeypatch, tmp_path, overwrite=True)
    assert "continuing" not in anew.text
    assert anew.trainer.step == 240


def test_a_run_continues_from_another_directory(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    train(monkeypatch, tmp_path / "b", stop_at=123)
    continued = train(monkeypatch, tmp_path / "c", resume=str(run_of(tmp_path / "b")))
    assert "from step 123" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "c")
    with pytest.raises(RunDirectoryError, match="holds no checkpoint"):
        train(monkeypatch, tmp_path / "d", resume=str(tmp_path))


def test_continuing_from_itself_by_another_spelling_loses_nothing(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    train(monkeypatch, tmp_path / "b", stop_at=123)
    own = run_of(tmp_path / "b")
    continued = train(monkeypatch, tmp_path / "b", resume=f"{own.parent}/../{own.parent.name}/seed-1", overwrite=True)
    assert "from step 123" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_the_same_command_goes_on_with_a_run_that_was_copied_from_another_directory(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    train(monkeypatch, tmp_path / "b", stop_at=123)
    command = {"resume": str(run_of(tmp_path / "b"))}
    stopped = train(monkeypatch, tmp_path / "c", stop_at=180, **command)
    assert "the same command continues" in stopped.text
    continued = train(monkeypatch, tmp_path / "c", **command)
    assert "from step 180" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert "finished at step 240" in train(monkeypatch, tmp_path / "c", **command).text


def test_a_run_that_another_process_has_made_meanwhile_is_not_overwritten(monkeypatch, tmp_path):
    find_origin = runs.find_origin

    def find_origin_then_be_overtaken(*args, **keys):
        origin = find_origin(*args, **keys)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "find_origin", find_origin)
            assert train(monkeypatch, tmp_path, steps=60).code == 0
        monkeypatch.setattr(runs, "find_origin", find_origin)
        return origin

    monkeypatch.setattr(runs, "find_origin", find_origin_then_be_overtaken)
    with pytest.raises(RunDirectoryError, match="another process has used it since"):
        train(monkeypatch, tmp_path)
    assert Checkpoints(run_of(tmp_path), keep=1).steps() == [60]


@pytest.mark.parametrize("content", [None, b"", b"\xff{:", b"[]", b"{}"])
def test_what_happens_to_the_files_for_people_does_not_keep_a_run_from_going_on(monkeypatch, tmp_path, content):
    train(monkeypatch, tmp_path, stop_at=60)
    for name in ("config.yaml", "summary.json"):
        (run_of(tmp_path) / name).unlink()
        if content is not None:
            (run_of(tmp_path) / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^num_envs=2: .* was started with 3"):
        train(monkeypatch, tmp_path, num_envs=2)
    assert "from step 60" in train(monkeypatch, tmp_path, steps=90).text


def test_a_run_whose_checkpoints_have_been_removed_is_not_overwritten(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path, steps=60)
    shutil.rmtree(run_of(tmp_path) / "checkpoints")
    curve = (run_of(tmp_path) / "eval.csv").read_text()
    with pytest.raises(RunDirectoryError, match="holds a run"):
        train(monkeypatch, tmp_path, steps=60)
    assert (run_of(tmp_path) / "eval.csv").read_text() == curve


def test_a_disk_that_is_full_before_the_run_begins_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "describe", full)
    with pytest.raises(RunDirectoryError, match=r"seed-1: cannot be written to \(No space left on device\)"):
        train(monkeypatch, tmp_path)


def test_a_stopped_run_says_what_it_takes_to_go_on(monkeypatch, tmp_path):
    assert (
        "nothing is saved with save_agent=false"
        in train(monkeypatch, tmp_path / "a", stop_at=60, save_agent=False).text
    )
    overwriting = train(monkeypatch, tmp_path / "b", stop_at=60, overwrite=True)
    assert "the same command without overwrite=true continues" in overwriting.text


def test_every_file_of_a_checkpoint_loads_without_running_code(monkeypatch, tmp_path):
    train(monkeypatch, tmp_path, stop_at=123)
    folder = run_of(tmp_path) / "checkpoints/123"
    files = {path.name for path in folder.iterdir()}
    assert files == {"manifest.json", "weights.pt", "learner.pt", "trainer.pt", "replay.json", "config.json"}
    for path in run_of(tmp_path).rglob("*.pt"):
        torch.load(path, weights_only=True)


def test_a_summary_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_summary", full)
        stopped = train(monkeypatch, tmp_path, steps=60, stop_at=30)
    assert stopped.text.count("summary.json not written ([Errno 28] No space left on device)") == 1
    assert "stopped by" in stopped.text


def test_a_run_whose_end_cannot_be_saved_has_not_finished_and_is_ended_again(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    save = Checkpoints.save

    def save_until_the_disk_is_full(self, step, state):
        if step >= 180:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(self, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_until_the_disk_is_full)
        with pytest.raises(UnsavedError, match="step 240, is not saved"):
            train(monkeypatch, tmp_path / "b", save_freq=60)
    again = train(monkeypatch, tmp_path / "b", save_freq=60)
    assert "from step 120" in again.text
    assert_same(state_of(unbroken.trainer), state_of(again.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_a_full_disk_keeps_the_last_checkpoint_warns_and_tries_again_when_next_due(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a")
    save, fsync = Checkpoints.save, os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_on_a_disk_that_is_full_for_a_while(self, step, state):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full if 90 <= step < 180 else fsync)
            return save(self, step, state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_on_a_disk_that_is_full_for_a_while)
        full_once = train(monkeypatch, tmp_path / "b", save_freq=30, stop_at=160)
        assert full_once.text.count("not written ([Errno 28] No space left on device); the one before stays") == 4
        folders = sorted(path.name for path in (run_of(tmp_path / "b") / "checkpoints").iterdir())
        assert folders == ["30", "60", "latest"]
        continued = train(monkeypatch, tmp_path / "b", save_freq=30)
    assert "from step 60" in continued.text
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
