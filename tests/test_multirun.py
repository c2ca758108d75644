import importlib.util

import pytest

from tdmpc.command_line import checked_arguments, from_hydra
from tdmpc.commands import CONFIG_DIRECTORY, EVALUATE, TRAIN
from tdmpc.config import Merge, TrainConfig
from tdmpc.keys import ConfigError
from tdmpc.multirun import label

JOBLIB, LOCAL = "hydra/launcher=joblib", "hydra/launcher=submitit_local"


def added(*arguments):
    """Return what is added to the arguments of a multirun."""
    given = ["-m", "merge=mean", *arguments]
    return checked_arguments(TRAIN, given)[len(given) :]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([JOBLIB, "merge.worker=0,1,2,3,4"], ["merge.workers=5", "hydra.launcher.n_jobs=5"]),
        ([JOBLIB, "merge.worker=range(4)"], ["merge.workers=4", "hydra.launcher.n_jobs=4"]),
        ([JOBLIB, "merge.worker=2,1"], ["merge.workers=3", "hydra.launcher.n_jobs=2"]),
        ([JOBLIB, "seed=1,2", "merge.worker=0,1,2"], ["merge.workers=3", "hydra.launcher.n_jobs=6"]),
        ([JOBLIB, "merge.worker=0,1", "merge.workers=4"], ["hydra.launcher.n_jobs=2"]),
        ([JOBLIB, "merge.worker=0,1", "hydra.launcher.n_jobs=9"], ["merge.workers=2"]),
        ([JOBLIB, "merge.worker=0,1", "hydra.launcher.n_jobs=-1"], ["merge.workers=2"]),
        ([LOCAL, "merge.worker=0,1,2"], ["merge.workers=3"]),
        ([JOBLIB, "seed=1,2"], []),
        (["seed=1,2", "merge.worker=1"], []),
    ],
)
def test_all_workers_of_a_multirun_start_at_once_and_know_how_many_they_are(arguments, expected):
    assert added(*arguments) == expected


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=basic"]])
def test_workers_one_after_the_other_are_refused_with_the_command_to_use(launcher):
    with pytest.raises(ConfigError) as refusal:
        added(*launcher, "merge.worker=0,1,2", "exp_name=two words")
    assert str(refusal.value) == (
        "merge.worker=0,1,2: workers must run at the same time, and Hydra's own launcher runs one after the other; "
        "use: python scripts/train.py -m hydra/launcher=joblib merge=mean merge.worker=0,1,2 'exp_name=two words'"
    )
    assert added(*launcher, "merge.worker=0", "seed=1,2") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge.worker=0,1,x"], "merge.worker=0,1,x: must be whole numbers of at least 0"),
        (["merge.worker=-1,0"], "merge.worker=-1,0: must be whole numbers of at least 0"),
        (
            ["merge.worker=0,1,2", "hydra.launcher.n_jobs=2"],
            "hydra.launcher.n_jobs=2: must be at least 3, for workers run at the same time",
        ),
    ],
)
def test_a_multirun_that_cannot_merge_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as refusal:
        added(JOBLIB, *arguments)
    assert str(refusal.value) == message


def test_a_launcher_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^hydra/launcher=submitit_slurm: is not installed; pip install -e '.\[slurm\]'"
    ):
        added("hydra/launcher=submitit_slurm", "merge.worker=0,1")


def test_other_commands_have_no_workers():
    arguments = ["-m", JOBLIB, "checkpoint=a.pt", "mpc=true,false"]
    assert checked_arguments(EVALUATE, arguments) == arguments


def composed(*overrides, **environ):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        return from_hydra(TrainConfig, compose("train", list(overrides)), environ)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4"}


def test_torchrun_numbers_the_workers():
    merge = composed("merge=mean", **TORCHRUN).merge
    assert (merge.worker, merge.workers) == (2, 4)
    merge = composed("merge=mean", "merge.worker=2", "merge.workers=4", **TORCHRUN).merge
    assert (merge.worker, merge.workers) == (2, 4)
    merge = composed("merge=mean", "merge.workers=5", RANK="2", WORLD_SIZE="4").merge
    assert (merge.worker, merge.workers) == (0, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["merge=mean", "merge.worker=1"], "merge.worker=1: must be left to torchrun, here 2"),
        (["merge=mean", "merge.workers=3"], "merge.workers=3: must be left to torchrun, which has started 4"),
        ([], "merge=none: must be a strategy, for torchrun has started workers"),
    ],
)
def test_what_contradicts_torchrun_is_refused(overrides, message):
    with pytest.raises(ConfigError) as refusal:
        composed(*overrides, **TORCHRUN)
    assert str(refusal.value) == message


def test_lines_have_labels_where_runs_share_a_console():
    merge = Merge(strategy="mean", workers=3, worker=1)
    assert label(merge, {}) == ""
    assert label(merge, {"LOCAL_WORLD_SIZE": "1"}) == ""
    assert label(merge, {"LOCAL_WORLD_SIZE": "3"}) == "worker 1"


@pytest.mark.parametrize("name", ["mean", "nesterov", "elastic", "weighted"])
def test_every_preset_is_its_strategy(name):
    assert composed(f"merge={name}", "merge.workers=3").merge.strategy == name
