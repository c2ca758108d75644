"""Workers that merge, as a user starts, stops and resumes them: real processes, all of them small."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.test_scripts import REPOSITORY, TINY, _ended, command, environment, run

SMALL = [
    *TINY,
    *["env.max_episode_steps=50", "num_envs=2", "steps_per_update=8", "eval_episodes=1", "eval_freq=1e6"],
    *["compile=false", "log.tensorboard=false", "threads=auto", "steps=240"],
]
MEAN = ["merge=mean", "merge.every=50", "merge.sync=true"]  # so that round 4 is at the last step


def group_of(cwd, name="default"):
    return cwd / "runs/gym-Pendulum-v1" / name / "seed-1"


def weights_of(worker, step=240):
    return torch.load(worker / f"checkpoints/{step}/weights.pt", weights_only=True)


def merges_of(worker):
    rows = [json.loads(line) for line in (worker / "metrics.jsonl").read_text().splitlines()]
    return [row["merge/round"] for row in rows if row.get("merge/peers", 0) > 0]


def episodes_read_by(worker):
    rows = [json.loads(line) for line in (worker / "metrics.jsonl").read_text().splitlines()]
    return sum(row.get("merge/episodes_read", 0) for row in rows)


def assert_merged(group, members, steps=240, rounds=4):
    """All members have gone through the same rounds, the last one at the last step, so they end with the same bits."""
    first, *others = (weights_of(group / f"worker-{worker}", steps) for worker in members)
    for other in others:
        assert all(torch.equal(first["model"][name], other["model"][name]) for name in first["model"])
        assert torch.equal(first["scale"], other["scale"])
    for worker in members:
        assert merges_of(group / f"worker-{worker}")
        assert weights_of(group / f"worker-{worker}", steps)["lifetime"]["merges"] == rounds


@pytest.mark.slow
def test_workers_of_joblib_merge_and_one_that_fails_stops_none_of_them(tmp_path):
    multirun = ["-m", "hydra/launcher=joblib", *SMALL, *MEAN, "merge.workers=3", "merge.worker=0,1,2,7"]
    ended = run(tmp_path, "train.py", *multirun)
    assert ended.returncode == 1
    errors = ended.stderr.splitlines()
    assert errors[:2] == [
        "error: merge.worker=7: must be below merge.workers (3)",
        "job 3 (merge.worker=7) failed with code 2",
    ]
    assert "Traceback" not in ended.stderr
    group = group_of(tmp_path)
    assert_merged(group, (1, 2))
    control, member = weights_of(group / "worker-0"), weights_of(group / "worker-1")
    assert control["lifetime"]["merges"] == 0
    assert not all(torch.equal(control["model"][name], member["model"][name]) for name in member["model"])
    table = (group / "group.txt").read_text()
    assert re.findall(r"^ +(\d) .* (\d) +\d+:\d\d(.*)$", table, re.M) == [
        ("0", "0", "  control"),
        ("1", "4", ""),
        ("2", "4", ""),
    ]
    assert ended.stdout.count("worker    return") == 1
    assert re.search(r"^worker 1 \| done: .* 4 merges in ", ended.stdout, re.M)
    assert re.search(r"^worker 1 \| threads=\d+: \d+ cores for 3 workers$", ended.stdout, re.M)
    plotted = run(tmp_path, "plot.py", str(group))
    assert (plotted.returncode, plotted.stderr) == (0, "")
    assert (group / "return_vs_steps.png").exists()
    again = run(tmp_path, "train.py", *multirun[:-1], "merge.worker=0,1,2")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished at step 240") == 3


@pytest.mark.slow
def test_a_worker_that_is_killed_stops_none_of_the_others_and_goes_on_alone(tmp_path):
    arguments = [*SMALL, "merge=mean", "merge.every=50", "vector=async", "save_freq=50", "steps=600"]
    multirun, group = ["-m", "hydra/launcher=joblib", *arguments, "merge.worker=0,1,2"], group_of(tmp_path)
    with started(tmp_path, command("train.py", *multirun)) as process:
        wait_for(lambda: len(list(group.glob("worker-2/checkpoints/*/manifest.json"))) == 2)
        os.kill(holder(group / "worker-2"), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "job 2 (merge.worker=2) was killed by SIGKILL" in errors.splitlines()
    assert weights_of(group / "worker-0", 600)
    assert weights_of(group / "worker-1", 600)["lifetime"]["merges"] > 0
    assert re.findall(r"^ +(\d) .*stopped", (group / "group.txt").read_text(), re.M) == ["2"]
    alone = run(tmp_path, "train.py", *arguments, "merge.worker=2", "merge.workers=3")
    assert alone.returncode == 0, alone.stderr
    assert "continuing" in alone.stdout
    assert merges_of(group / "worker-2")[-1] == 11
    assert "stopped" not in (group / "group.txt").read_text()


@pytest.mark.slow
def test_workers_of_submitit_merge_and_share_their_episodes(tmp_path):
    both = [*SMALL, *MEAN, "merge.share=both", "merge.worker=0,1,2"]
    ended = run(tmp_path, "train.py", "-m", "hydra/launcher=submitit_local", *both)
    assert (ended.returncode, ended.stderr) == (0, "")
    group = group_of(tmp_path)
    assert_merged(group, (1, 2))
    # Two environments with episodes of 50 steps: the other member has ended two by its step 100, four by 200.
    assert [episodes_read_by(group / f"worker-{worker}") for worker in (0, 1, 2)] == [0, 4, 4]
    logs = [path.read_text() for path in (tmp_path / "runs/.submitit").glob("*/*.out")]
    assert len(logs) == 3
    assert sorted(log.count("4 merges in") for log in logs) == [0, 1, 1]


@pytest.mark.slow
def test_workers_of_torchrun_merge_and_those_that_it_starts_again_continue(tmp_path):
    options = ["--nproc-per-node", "2", "--max-restarts", "2", "--standalone"]
    distributed = [
        *SMALL,
        "steps=440",
        "merge=mean",
        "merge.every=50",
        "merge.exchange=distributed",
        "merge.control=false",
    ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        str(REPOSITORY / "scripts/train.py"),
        *distributed,
    ]
    group = group_of(tmp_path)
    with started(tmp_path, torchrun) as process:
        wait_for(lambda: list(group.glob("worker-1/checkpoints/*/manifest.json")))
        os.kill(holder(group / "worker-1"), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    output = (tmp_path / "output").read_text()
    assert process.returncode == 0, errors
    assert "worker 1 | continuing" in output
    assert_merged(group, (0, 1), steps=440, rounds=8)


@contextmanager
def started(cwd, words):
    """Start a command in a process group of its own, which is gone at the end; what it prints is in `cwd/output`."""
    with (cwd / "output").open("w") as file:
        pipes = {"stdout": file, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(words, cwd=cwd, start_new_session=True, env=environment(), **pipes)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def holder(run_directory):
    found = re.match(r"process (\d+) on", (run_directory / ".holder").read_text())
    assert found
    return int(found[1])


def wait_for(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come to this"
        time.sleep(0.05)
    return result


def have_merged(group, workers, rounds):
    files = [group / f"worker-{worker}/metrics.jsonl" for worker in workers]
    return all(path.exists() and f'"merge/round": {rounds}' in path.read_text() for path in files)


# Ctrl-C in a terminal goes to all processes, `kill` to one.
@pytest.mark.parametrize(
    ("launcher", "to_all"),
    [
        pytest.param("joblib", False, marks=pytest.mark.slow),
        pytest.param("joblib", True, marks=pytest.mark.slow),
        pytest.param("submitit_local", True, marks=pytest.mark.slow),
    ],
)
def test_a_multirun_that_is_to_stop_saves_all_workers_and_the_same_command_goes_on(tmp_path, launcher, to_all):
    endless = [*SMALL, *MEAN, "steps=1e6", "log_freq=50"]
    multirun = ["-m", f"hydra/launcher={launcher}", *endless, "merge.worker=0,1,2"]
    group = group_of(tmp_path)
    with started(tmp_path, command("train.py", *multirun)) as process:
        wait_for(lambda: have_merged(group, (1, 2), rounds=2))
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["stopping: all jobs save first; once more, and nothing is waited for"]
    saved = {}
    for worker in range(3):
        summary = json.loads((group / f"worker-{worker}/summary.json").read_text())
        assert summary["ending"] == "stopped"
        saved[worker] = summary["counts"]["steps"]
        assert (group / f"worker-{worker}/checkpoints/{saved[worker]}/manifest.json").exists()
    assert (group / "group.txt").read_text().count("stopped") == 3
    assert not list((tmp_path / "runs").glob(".stop*"))
    assert _ended(process.pid)
    if launcher != "joblib" or to_all:
        return
    rounds = min(saved[1], saved[2]) // 50 + 3
    steps = 40 + 50 * rounds
    further = run(tmp_path, "train.py", *multirun, f"steps={steps}")
    assert further.returncode == 0, further.stderr
    assert further.stdout.count("| continuing") == 3
    assert_merged(group, (1, 2), steps, rounds)


def test_workers_one_after_the_other_are_refused_at_once(tmp_path):
    refused = run(tmp_path, "train.py", "-m", *SMALL, *MEAN, "merge.worker=0,1,2")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: merge.worker=0,1,2: ")
    assert "-m hydra/launcher=joblib" in line
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_refused_ends_no_sweep(tmp_path):
    swept = run(tmp_path, "train.py", "-m", *SMALL, "steps=60,0,58", "exp_name=of-${steps}")
    assert swept.returncode == 1
    assert swept.stderr.startswith(
        "error: steps=0: must be a whole number of at least 1\njob 1 (steps=0) failed with code 2\n"
    )
    assert len(re.findall("^done: ", swept.stdout, re.M)) == 2
    assert {path.parent.name for path in Path(tmp_path).rglob("seed-1")} == {"of-60", "of-58"}
