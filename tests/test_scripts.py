"""The scripts as a user runs them."""

import csv
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tdmpc.seeding import Seeds, Stream

REPOSITORY = Path(__file__).parents[1]
GOLDEN = REPOSITORY / "tests/golden"
TINY = [
    "task=gym:Pendulum-v1",
    *["model_size=1", "enc_dim=16", "mlp_dim=16", "latent_dim=16", "num_bins=21", "iterations=1", "num_samples=16"],
    *["num_elites=4", "num_pi_trajs=2", "batch_size=8", "buffer_size=10000", "threads=1"],
    *["num_envs=3", "steps_per_update=4", "seed_steps=40", "eval_episodes=2", "eval_freq=200", "log_freq=100"],
]


def command(script, *arguments):
    return [sys.executable, str(REPOSITORY / "scripts" / script), *arguments]


def environment():
    """Return the variables of a user's shell; the tests before may have set MUJOCO_GL for this process."""
    return {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"}


def run(cwd, script, *arguments):
    return subprocess.run(
        command(script, *arguments), cwd=cwd, capture_output=True, text=True, timeout=120, env=environment()
    )


def test_train_then_evaluate_then_train_on_from_the_weights(tmp_path):
    result = run(tmp_path, "train.py", *TINY, "steps=300", "exp_name=first")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    directory = tmp_path / "runs/gym-Pendulum-v1/first/seed-1"
    assert {path.name for path in directory.iterdir()} >= {"config.yaml", "metrics.jsonl", "eval.csv", "checkpoints"}
    assert [row["step"] for row in csv.DictReader((directory / "eval.csv").read_text().splitlines())] == [
        "0",
        "201",
        "300",
    ]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [102, 201, 300]
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    for sentence in ("pretraining: 10 updates", "evaluating 2 episodes", "done: 300 steps", "evaluate: python scripts"):
        assert sentence in result.stdout

    search = ["num_samples=16", "num_elites=4", "num_pi_trajs=2"]
    arguments = ["task=gym:Pendulum-v1", f"checkpoint={directory}", "eval_episodes=3", "num_envs=2", *search]
    evaluations = [run(tmp_path, "evaluate.py", *arguments) for _ in range(2)]
    assert evaluations[0].returncode == 0, evaluations[0].stderr
    assert "weights of 300 steps and 74 updates" in evaluations[0].stdout
    assert evaluations[0].stdout.count("episode ") == 3
    assert evaluations[0].stdout == evaluations[1].stdout

    again = run(tmp_path, "train.py", *TINY, "steps=60", "exp_name=second", f"checkpoint={directory}")
    assert again.returncode == 0, again.stderr
    refused = run(tmp_path, "train.py", *TINY, "steps=60", "exp_name=second", "resume=never")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: runs/gym-Pendulum-v1/second/seed-1: holds a run;")
    assert len(refused.stderr.splitlines()) == 1
    finished = run(tmp_path, "train.py", *TINY, "steps=60", "exp_name=second", f"checkpoint={directory}")
    assert finished.returncode == 0
    assert "finished at step 60. To go on, raise steps" in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_envs=0"], "num_envs=0: must be"),
        (["steps=-1"], "steps=-1: must be"),
        (["task=walker-wlak"], "walker-walk"),
        (["task=gym:CartPole-v1"], "gym:CartPole-v1"),
        (["env.no_such_option=1"], "no_such_option"),
        (["model_size=2"], "model_size=2: must be one of 1, 5, 19, 48, 317"),
        (["checkpoint=nowhere.pt"], "checkpoint=nowhere.pt: there is no such file"),
        ([f"checkpoint={GOLDEN}/q2.pt"], "latent_dim 32 (here 16)"),
        (["buffer_size=1e12"], "GB are free"),
        (["env.max_episode_steps=0"], "max_episode_steps"),
        (["num_env=3"], "num_envs"),
        ([f"run_root={GOLDEN}/q2.pt"], "q2.pt is not a directory"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, arguments, message):
    result = run(tmp_path, "train.py", *TINY, "steps=100", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_command_leaves_nothing_behind_and_overwrites_nothing(tmp_path):
    first = run(tmp_path, "train.py", *TINY, "steps=60")
    assert first.returncode == 0, first.stderr
    directory = tmp_path / "runs/gym-Pendulum-v1/default/seed-1"
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for arguments in ([f"checkpoint={GOLDEN}/q2.pt"], ["buffer_size=1e12"], ["env.no_such_option=1"]):
        refused = run(tmp_path, "train.py", *TINY, "steps=60", "overwrite=true", *arguments)
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    itself = run(tmp_path, "train.py", *TINY, "steps=60", "overwrite=true", f"checkpoint={directory}")
    assert itself.returncode == 0, itself.stderr


@pytest.mark.parametrize("name", ["q2", "q2_episodic"])
def test_published_files_are_trained_on_and_evaluated(tmp_path, name):
    sizes = ["enc_dim=24", "mlp_dim=40", "latent_dim=32", "num_q=2", "num_bins=101"]
    task = ["task=gym:Hopper-v5", f"checkpoint={GOLDEN}/{name}.pt"]
    episodic = f"episodic={str(name == 'q2_episodic').lower()}"
    options = ["env.terminate_when_unhealthy=false"] if name == "q2" else []
    trained = run(
        tmp_path, "train.py", *TINY, *sizes, *task, *options, episodic, "steps=90", "env.max_episode_steps=20"
    )
    assert trained.returncode == 0, trained.stderr
    evaluated = run(tmp_path, "evaluate.py", *task, "eval_episodes=2", "env.max_episode_steps=5")
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout.count("episode ") == 2


def test_the_command_that_the_end_of_a_run_recommends_works(tmp_path):
    trained = run(tmp_path, "train.py", *TINY, "steps=60", "env.max_episode_steps=20", "horizon=4")
    (line,) = [line for line in trained.stdout.splitlines() if line.startswith("evaluate: ")]
    script, *arguments = line.removeprefix("evaluate: python scripts/").split()
    assert {"horizon=4", "env.max_episode_steps=20", "num_samples=16", "task=gym:Pendulum-v1"} <= set(arguments)
    evaluated = run(tmp_path, script, *arguments, "eval_episodes=1")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "steps 20" in evaluated.stdout
    (line,) = [line for line in trained.stdout.splitlines() if line.startswith("pictures: ")]
    script, *arguments = line.removeprefix("pictures: python scripts/").split()
    assert run(tmp_path, script, *arguments).returncode == 0
    assert list(tmp_path.rglob("return_vs_steps.png"))


def test_evaluate_refuses_weights_of_another_task(tmp_path):
    result = run(tmp_path, "evaluate.py", "task=gym:Pendulum-v1", f"checkpoint={GOLDEN}/q2.pt")
    assert result.returncode == 2
    assert "observation_size 11 (here 3), action_size 3 (here 1)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_termination_without_episodic_says_what_to_set_and_can_be_corrected(tmp_path):
    arguments = [*TINY, "task=gym:Hopper-v5", "steps=250", "seed_steps=200", "eval_episodes=1"]
    result = run(tmp_path, "train.py", *arguments)
    assert result.returncode == 2
    assert "episodic=false" in result.stderr
    assert "set episodic=true" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert run(tmp_path, "train.py", *arguments, "episodic=true").returncode == 0


@pytest.mark.parametrize("trouble", ["raise", "exit"])
def test_a_crash_of_an_environment_ends_the_run_with_its_number_and_traceback(tmp_path, trouble):
    # The environments of evaluations, which are in the run's own process, have no trouble.
    first = Seeds(1).integer(Stream.TRAIN_EPISODE, 0, 0) % 2**20
    trouble_in_the_first = [f"env.trouble={trouble}", f"env.trouble_id={first}"]
    toy = ["task=gym:tests.toys:Toy-v0", "episodic=true", "vector=async", *trouble_in_the_first]
    process = start(tmp_path, *TINY, *toy, "steps=500", "seed_steps=100", PYTHONPATH=str(REPOSITORY))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "environment 0" in errors
    assert ("KeyError: 'toy trouble'" if trouble == "raise" else "ended with exit code 3") in errors
    assert _ended(process.pid)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_saves_the_run_leaves_a_summary_and_no_process(tmp_path, number, code):
    process = start(tmp_path, *TINY, "steps=1e6", "compile=false", "eval_freq=1e6", "vector=async")
    wait_for_learning(process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == ""
    assert f"stopped by {signal.Signals(number).name} after" in output
    assert "bottleneck: " in output
    (summary,) = tmp_path.rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["ending"] == "stopped"
    assert content["counts"]["updates"] > 0
    assert content["sections"]["update"]["count"] > 0
    assert [path.parent.name for path in tmp_path.rglob("manifest.json")] == [str(content["counts"]["steps"])]
    assert _ended(process.pid)


def test_two_processes_never_write_one_run_and_the_second_is_told_of_the_first(tmp_path):
    process = start(tmp_path, *TINY, "steps=1e6", "compile=false", "eval_freq=1e6")
    wait_for_learning(process)
    second = run(tmp_path, "train.py", *TINY, "steps=1e6", "compile=false", "eval_freq=1e6")
    process.kill()
    process.communicate()
    assert second.returncode == 2
    assert f"another process writes this run (process {process.pid} on" in second.stderr
    assert len(second.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_run_killed_thirty_times_ends_as_one_never_killed(tmp_path):
    arguments = [*TINY, "steps=4000", "save_freq=20", "eval_freq=500", "log_freq=100", "log.tensorboard=false"]
    unbroken = run(tmp_path, "train.py", *arguments, "exp_name=unbroken")
    assert unbroken.returncode == 0, unbroken.stderr
    moments, kills = random.Random(0), 0
    while kills < 30:
        process = start(tmp_path, *arguments, "exp_name=killed")
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("run directory:"):
                break
        time.sleep(moments.uniform(0, 0.6))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed often enough"
        kills += 1
    finished = run(tmp_path, "train.py", *arguments, "exp_name=killed")
    assert finished.returncode == 0, finished.stderr
    one, other = (tmp_path / "runs/gym-Pendulum-v1" / name / "seed-1" for name in ("unbroken", "killed"))
    for name in ("weights.pt", "learner.pt"):
        first, second = (_leaves(torch.load(d / "checkpoints/4002" / name, weights_only=True)) for d in (one, other))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first if isinstance(first[key], torch.Tensor))
    assert (one / "eval.csv").read_text() == (other / "eval.csv").read_text()
    steps = [[json.loads(row)["step"] for row in (d / "metrics.jsonl").read_text().splitlines()] for d in (one, other)]
    assert steps[0] == steps[1]
    assert not [path for path in other.rglob("*") if path.suffix in (".part", ".tmp")]


def wait_for_learning(process):
    for line in process.stdout:
        if " loss " in line and "pretrain" not in line:
            return
    raise AssertionError(f"the run ended before it learned: {process.communicate()[1]}")


def _leaves(value, path=""):
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in _leaves(item, f"{path}/{key}").items()}


def test_an_evaluation_is_filmed_and_does_not_change_training(tmp_path):
    walker = [*TINY, "task=walker-walk", "steps=60", "eval_episodes=1", "eval_freq=1e6"]
    filmed = run(tmp_path, "train.py", *walker, "save_video=true", "exp_name=filmed")
    assert filmed.returncode == 0, filmed.stderr
    videos = sorted(path.name for path in tmp_path.rglob("*.mp4"))
    if "no videos will be made" in filmed.stdout:
        pytest.skip("nothing here can draw")
    assert videos == ["0.mp4", "60.mp4"]
    plain = run(tmp_path, "train.py", *walker, "exp_name=plain")
    assert plain.returncode == 0, plain.stderr
    first, second = (torch.load(path, weights_only=True)["model"] for path in sorted(tmp_path.rglob("weights.pt")))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_task_that_cannot_be_drawn_is_trained_without_videos(tmp_path):
    """Pendulum is drawn by pygame, which is not among the dependencies."""
    if importlib.util.find_spec("pygame"):
        pytest.skip("pygame is installed")
    result = run(tmp_path, "train.py", *TINY, "steps=60", "save_video=true")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("warning: save_video=true: no videos will be made") == 1
    assert "pygame" in result.stdout
    assert not list(tmp_path.rglob("*.mp4"))


def start(cwd, *arguments, **variables):
    """Start a run in a process group of its own."""
    return subprocess.Popen(
        command("train.py", *arguments),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**environment(), "PYTHONUNBUFFERED": "1", **variables},
    )


def _ended(group):
    """Tell whether all processes of a group end within 10 s."""
    deadline = time.monotonic() + 10
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(group)


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
