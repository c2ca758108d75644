import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

import scripts.benchmark  # noqa: F401, which tells Hydra the defaults
from envs import make_vector
from tdmpc.benchmarks import ops
from tdmpc.benchmarks.agent_ops import AGENT_OPS
from tdmpc.benchmarks.env_ops import Stepper
from tdmpc.benchmarks.merge_ops import Group
from tdmpc.benchmarks.replay_ops import fill
from tdmpc.benchmarks.results import Record, Results
from tdmpc.command_line import checked_arguments, from_hydra
from tdmpc.commands import BENCHMARK, CONFIG_DIRECTORY, HELP_WIDTH, help_text
from tdmpc.config import BenchmarkConfig, TrainConfig
from tdmpc.keys import ConfigError, from_mapping, keys_of
from tdmpc.merging.exchange import Filesystem
from tdmpc.replay import ReplayBuffer
from tdmpc.seeding import Seeds

REPOSITORY = Path(__file__).parents[2]
TOY = "gym:tests.toys:Toy-v0"
OVERLAP = ("step", "update", "both", "exposed")
TINY = {
    **{"task": TOY, "episodic": True, "model_sizes": 1, "num_envs": 2, "repeats": 3, "budget_s": 0.01, "threads": 1},
    **{"iterations": 1, "num_samples": 16, "num_elites": 4, "num_pi_trajs": 2, "batch_size": 8, "buffer_size": 1000},
    "compile": False,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny(**keys):
    return from_mapping(BenchmarkConfig, TINY | keys)


def composed(*arguments):
    overrides = checked_arguments(BENCHMARK, arguments)
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        return from_hydra(BenchmarkConfig, compose("benchmark", overrides))


def run_script(*arguments):
    command = [sys.executable, str(REPOSITORY / "scripts/benchmark.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def slowed(path, factor):
    """Make every time in a file smaller, so that the next ones are slower by comparison."""
    content = json.loads(path.read_text())
    for record in content["records"]:
        record["median_s"] /= factor
    path.write_text(json.dumps(content))


def test_the_script_times_every_operation_and_writes_all_it_prints():
    task = ["task=gym:Pendulum-v1", "episodic=false", "num_envs=[1,2]"]
    tiny_keys = [f"{name}={value}" for name, value in TINY.items() if name not in ("task", "episodic", "num_envs")]
    result = run_script("suite=ops", "out=here/a.json", *task, *tiny_keys)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [str(path) for path in Path().rglob("*")] == ["here", "here/a.json"]
    written = Results.read(Path("here/a.json"))
    assert written.machine.keys() >= {"cpu", "cores", "torch", "python", "platform", "date", "commit"}
    assert written.machine["threads"] == 1
    assert written.machine["peak_gflops_per_s"].keys() == {"float32", "bfloat16"}
    assert written.config["batch_size"] == 8
    assert [tuple(record.subject) for record in written.records] == [
        *[("env_step", None, 1, "sync"), ("env_step", None, 1, "async"), ("sample", None, 1, None)],
        *[("add", None, 1, None), ("env_step", None, 2, "sync"), ("env_step", None, 2, "async")],
        *[("sample", None, 2, None), ("add", None, 2, None)],
        *[("plan", 1, 1, None), ("plan", 1, 2, None), ("update", 1, None, None)],
        *[("overlap", 1, num_envs, variant) for num_envs in (1, 2) for variant in OVERLAP],
        *[("merge", 1, None, "mean"), ("save", 1, None, None)],
    ]
    assert all(record.line() in result.stdout for record in written.records)
    for record in written.records:
        assert 0 < record.min_s <= record.median_s <= record.p90_s
        assert record.repeats == 3
        check_record(record)


def check_record(record: Record):
    """Check what a record says besides times."""
    has_products = record.name in ("plan", "update")
    assert (record.gflop is not None) == has_products == (record.peak_share is not None)
    if record.gflop is not None:
        assert record.precision == "float32"
        assert record.gflops_per_s == pytest.approx(record.gflop / record.median_s)
    assert (record.bytes is not None) == (record.name in ("sample", "add", "merge", "save"))
    assert (record.hidden_s is not None) == (record.hidden_frac is not None) == (record.variant == "both")


def test_twice_the_environments_are_twice_the_arithmetic_of_a_plan():
    ops.run(tiny(ops="plan", num_envs=[1, 2, 4], out="a.json"))
    one, two, four = (record.gflop for record in Results.read(Path("a.json")).records)
    # All but the stacking of weights, which is no product, is done for every environment.
    assert (two / one, four / one) == (pytest.approx(2), pytest.approx(4))


def test_the_precision_is_the_one_that_was_asked_for():
    ops.run(tiny(ops=["plan", "update"], precision="fp32", update_precision="bf16", out="a.json"))
    plan, update = Results.read(Path("a.json")).records
    assert plan.precision == "float32"
    assert update.precision is not None
    assert update.precision.startswith("bfloat16")


def test_only_what_is_asked_for_is_timed(capsys):
    ops.run(tiny(ops=["add", "env_step"], vector="sync", out="a.json"))
    assert [record.name for record in Results.read(Path("a.json")).records] == ["env_step", "add"]


def test_without_a_name_every_run_makes_a_new_file_in_the_folder_of_benchmarks(capsys):
    for _ in range(2):
        ops.run(tiny(ops="add"))
    files = sorted(Path("runs/benchmark").iterdir())
    assert len(files) == 2
    assert all(file.name.startswith("ops-gym-tests.toys-Toy-v0-") for file in files)
    assert f"wrote {files[1]}" in capsys.readouterr().out


def test_a_comparison_names_what_got_slower_and_fails_only_if_asked_to(capsys):
    ops.run(tiny(ops="sample", out="a.json"))
    slowed(Path("a.json"), 1000)
    ops.run(tiny(ops="sample", out="b.json", baseline="a.json"))
    assert "slower: sample with 2 environments (" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        ops.run(tiny(ops="sample", out="c.json", baseline="a.json", fail_if_slower=True))
    assert leaving.value.code == 1
    assert Path("c.json").exists()
    ops.run(tiny(ops="sample", out="d.json", baseline="a.json", fail_if_slower=True, slower=1e9))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"out": "used.json"}, "out=used.json: exists already; must be a new file"),
        ({"out": "used.json/a.json"}, "out=used.json/a.json: must be in a folder that can be made (File exists)"),
        ({"baseline": "no.json"}, "baseline=no.json: cannot be read (No such file or directory)"),
        ({"baseline": "used.json"}, "baseline=used.json: must be a JSON file that scripts/benchmark.py wrote"),
        ({"buffer_size": 1e14}, "buffer_size=100000000000000: needs 2900000.0 GB of memory"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(keys, message):
    Path("used.json").write_text("{}")
    with pytest.raises(ConfigError) as refusal:
        ops.run(tiny(**keys))
    assert str(refusal.value).startswith(message)
    assert list(Path().iterdir()) == [Path("used.json")]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("suite=all", "suite=all: must be ops"),
        ("ops=[plan,updat]", "ops=updat: must be one of plan, update, sample, add, env_step, overlap, merge, save"),
        ("ops=[]", "ops=[]: must not be empty"),
        ("model_sizes=[1,2]", "model_sizes=2: must be one of 1, 5, 19, 48, 317"),
        ("num_envs=[1,0]", "num_envs=0: must be a whole number of at least 1"),
        ("num_envs=[null]", "num_envs=null: must be a whole number of at least 1"),
        ("num_envs=[[1]]", "num_envs=[1]: must be a whole number of at least 1"),
        ("num_envs={a:1}", "num_envs={'a': 1}: must be a whole number of at least 1"),
        ("buffer_size=15", "buffer_size=15: must be at least num_envs * (horizon + 1) = 16, to hold one slice of"),
        ("repeats=2", "repeats=2: must be a whole number of at least 3"),
        ("budget_s=0", "budget_s=0: must be a finite number above 0"),
        ("slower=0.9", "slower=0.9: must be a finite number of at least 1"),
        ("fail_if_slower=true", "fail_if_slower=true: must be false without a baseline"),
        ("model_size=5", "model_size: no such key; close to it: model_sizes"),
        ("num_envs=1,4", "num_envs=1,4: several values need the flag --multirun"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(argument, message):
    with pytest.raises(ConfigError) as refusal:
        composed(argument)
    assert str(refusal.value).startswith(message)
    assert len(str(refusal.value).splitlines()) == 1


def test_the_script_refuses_with_one_line_and_leaves_nothing():
    result = run_script("ops=[plann]")
    line = "error: ops=plann: must be one of plan, update, sample, add, env_step, overlap, merge, save\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)
    assert list(Path().iterdir()) == []


def test_lists_are_composed_and_null_stands_for_all_or_the_usual():
    assert composed() == BenchmarkConfig()
    config = composed("num_envs=[4,1e1,4]", "ops=plan", "model_sizes=[19]")
    assert (config.num_envs, config.ops, config.model_sizes) == ((4, 10), ("plan",), (19,))
    assert (BenchmarkConfig().num_envs, BenchmarkConfig().model_sizes) == ((1, 4), (1, 5))
    assert set(BenchmarkConfig().ops) == {"env_step", "sample", "add", *AGENT_OPS}


def test_a_run_is_configured_by_the_keys_of_training():
    config = BenchmarkConfig(num_samples=100, task="cup-catch", threads=1, dropout=0.5)
    expected = TrainConfig(
        **{"num_samples": 100, "task": "cup-catch", "threads": 1, "dropout": 0.5},
        **{"model_size": 19, "num_envs": 8, "eval_episodes": 1, "vector": "sync"},
    )
    assert config.train_config(19, num_envs=8) == expected


def test_help_has_every_key_and_example_and_fits_the_terminal():
    text = help_text(BENCHMARK)
    assert all(f"\n  {name}=" in text for name in keys_of(BenchmarkConfig))
    assert all(example in text for example in BENCHMARK.examples)
    assert max(len(line) for line in text.splitlines()) <= HELP_WIDTH
    for example in BENCHMARK.examples:
        checked_arguments(BENCHMARK, example.split())


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_filled_replay_has_whole_episodes_can_be_sampled_and_goes_on(num_envs):
    sizes = {"observation_size": 3, "action_size": 2}
    replay = ReplayBuffer(num_envs=num_envs, capacity=301, **sizes, horizon=3, rng=np.random.default_rng(0))
    with make_vector(TOY, 1, vector="sync") as like:
        fill(replay, 301, num_envs, like)
    ring = 301 // num_envs
    assert len(replay) == ring * num_envs
    envs, positions = np.repeat(np.arange(num_envs), ring), np.tile(np.arange(ring), num_envs)
    timestep = replay.read(envs, positions)["timestep"].numpy()
    assert (timestep == positions % 51).all()  # episodes of toys have 50 steps
    obs, action = np.zeros((num_envs, 3), np.float32), np.zeros((num_envs, 2), np.float32)
    replay.add(action, np.zeros(num_envs), obs, np.zeros(num_envs, bool))
    assert replay.sample(256)["obs"].shape == (4, 256, 3)


def test_steps_go_on_over_the_ends_of_episodes(tmp_path):
    with make_vector(TOY, 1, vector="sync", options={"log_dir": str(tmp_path)}) as envs:
        stepper = Stepper(envs, Seeds(1))
        for _ in range(60):
            stepper.prepare()
            stepper.step()
    (log,) = tmp_path.glob("*.jsonl")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("action" in entry for entry in entries) == 60
    assert len({entry["seed"] for entry in entries if "seed" in entry}) >= 60 / 12


def test_a_merge_takes_over_the_mean_of_what_both_published(tmp_path):
    options = {"every": 1, "sync": True, "timeout_s": 0.0, "max_age": 0, "announce": pytest.fail}
    own, peer = (Filesystem(tmp_path, worker, (0, 1), {}, **options) for worker in (0, 1))
    weight = torch.tensor([1.0, 2.0])
    with closing(own), closing(peer):
        group = Group(own, peer, {"weight": weight})
        for published in (3.0, 7.0):
            group.prepare()
            weight.fill_(published)
            group.merge()
    # The other one published [1, 2], then the mean of that and 3, which is [2, 2.5].
    assert weight.tolist() == [4.5, 4.75]
