"""The scripts as a user runs them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def run(cwd, script, *arguments):
    return subprocess.run(command(script, *arguments), cwd=cwd, capture_output=True, text=True, timeout=120)


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
    refused = run(tmp_path, "train.py", *TINY, "steps=60", "exp_name=second")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: runs/gym-Pendulum-v1/second/seed-1: holds a run;")
    assert len(refused.stderr.splitlines()) == 1


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
        (["num_env=3"], "num_envs"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path, arguments, message):
    result = run(tmp_path, "train.py", *TINY, "steps=100", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("config.yaml"))


def test_evaluate_refuses_weights_of_another_task(tmp_path):
    result = run(tmp_path, "evaluate.py", "task=gym:Pendulum-v1", f"checkpoint={GOLDEN}/q2.pt")
    assert result.returncode == 2
    assert "observation_size 11 (here 3), action_size 3 (here 1)" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_termination_without_episodic_says_what_to_set(tmp_path):
    result = run(tmp_path, "train.py", *TINY, "task=gym:Hopper-v5", "steps=1000", "seed_steps=1000")
    assert result.returncode == 2
    assert "episodic=false" in result.stderr
    assert "set episodic=true" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_saves_the_weights_and_leaves_no_process(tmp_path):
    arguments = [*TINY, "steps=1e6", "eval_freq=1e6", "vector=async"]
    process = subprocess.Popen(
        command("train.py", *arguments), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if " train " in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in output
    assert errors == ""
    assert list(tmp_path.rglob("weights.pt"))
    deadline = time.monotonic() + 10
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(process.pid)


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
