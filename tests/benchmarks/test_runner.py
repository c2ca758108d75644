import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tdmpc.benchmarks.curves import last_row
from tdmpc.benchmarks.plan import make_plan
from tdmpc.benchmarks.processes import TrainProcess
from tdmpc.benchmarks.runner import Interrupted, RunFailed, Runner, job_charged_s, peak_bytes
from tdmpc.benchmarks.suites import WallclockConfig
from tdmpc.config import TrainConfig
from tdmpc.keys import keys_of, unknown_key
from tests.benchmarks.fake_training import POLL_S, FakeTraining

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path)


def make_job(tmp_path, *base, variants="default"):
    config = WallclockConfig(task="gym:Toy-v0", variants=(variants,), seeds=(1,), out=str(tmp_path))
    return make_plan(config, base, cores=2).jobs[0]


def runner(training, budget_s=60.0, **more):
    return Runner(training, budget_s, sleep=lambda seconds: None, **more)


def rows(job):
    return [json.loads(line) for line in (job.runs[0] / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_stopped_when_its_budget_is_used_up_and_evaluated_there(job):
    training = FakeTraining()
    runner(training).run(job)
    first, second = training.started
    last = last_row(job.runs[0] / "metrics.jsonl")
    assert last is not None
    assert 60 <= job_charged_s(job) < 60 + 2 * POLL_S
    assert (last["kind"], last["eval/episode_reward"]) == ("eval", last["step"] / 100)
    assert "steps" not in first
    assert second == first | {"steps": str(last["step"]), "compile": "true"}


def test_time_that_does_not_count_is_not_charged(job):
    runner(FakeTraining()).run(job)
    assert rows(job)[-1]["elapsed_s"] > job_charged_s(job) + 20


def test_a_job_that_is_done_is_known_and_starts_nothing(job):
    training = FakeTraining()
    assert not runner(training).is_done(job)
    runner(training).run(job)
    assert runner(training).is_done(job)
    started = len(training.started)
    runner(training).run(job)
    assert len(training.started) == started
    assert not runner(training, budget_s=200.0).is_done(job)


def test_a_run_that_ends_by_its_steps_is_done_before_its_budget_is(tmp_path):
    job, training = make_job(tmp_path, "steps=300"), FakeTraining()
    runner(training).run(job)
    assert runner(training).is_done(job)
    assert len(training.started) == 1
    assert job_charged_s(job) < 60


def test_a_run_that_was_killed_goes_on_where_it_was(job):
    training = FakeTraining(dies_after=4)
    with pytest.raises(RunFailed, match=r"exit code 137: training \(see .*default-seed-1.log\)"):
        runner(training).run(job)
    charged = job_charged_s(job)
    assert 0 < charged < 60
    runner(training).run(job)
    assert runner(training).is_done(job)
    steps = [row["step"] for row in rows(job) if row["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert 60 <= job_charged_s(job) < 60 + 2 * POLL_S


def test_a_run_that_was_stopped_before_its_last_evaluation_makes_only_that(job):
    class Forgetful(FakeTraining):
        def __call__(self, arguments, log):
            if any(argument.startswith("compile=") for argument in arguments):
                raise KeyboardInterrupt
            return super().__call__(arguments, log)

    with pytest.raises(KeyboardInterrupt):
        runner(Forgetful()).run(job)
    training, charged = FakeTraining(), job_charged_s(job)
    runner(training).run(job)
    assert training.order == []
    assert len(training.started) == 1
    assert job_charged_s(job) == charged
    assert runner(training).is_done(job)


def test_a_group_is_charged_what_its_slowest_worker_is_and_ends_as_one(tmp_path):
    job, training = make_job(tmp_path, variants="trio=[merge=mean,merge.workers=3]"), FakeTraining()
    runner(training).run(job)
    assert [run.name for run in job.runs] == ["worker-1", "worker-2"]
    assert all(json.loads((run / "summary.json").read_text())["ending"] == "finished" for run in job.runs)
    steps = [row["step"] for run in job.runs if (row := last_row(run / "metrics.jsonl"))]
    assert training.started[1]["steps"] == str(min(steps))


def test_a_failure_says_why_in_one_line(job):
    training = FakeTraining(fails=["default"])
    with pytest.raises(RunFailed, match="exit code 2: error: num_samples: are too many") as failure:
        runner(training).run(job)
    assert len(str(failure.value).splitlines()) == 1


def test_the_reason_of_a_crash_is_its_exception_and_not_what_hydra_says_of_it(job):
    class Crash(FakeTraining):
        def __call__(self, arguments, log):
            process = super().__call__(arguments, log)
            log.write_text("ValueError: too deep\n\nSet the environment variable HYDRA_FULL_ERROR=1 for all of it.\n")
            process.poll = lambda: 1
            return process

    with pytest.raises(RunFailed, match="exit code 1: ValueError: too deep"):
        runner(Crash()).run(job)


def test_a_stop_of_the_benchmark_stops_the_run_and_waits_for_it(job):
    polls, training = [], FakeTraining()
    watched = runner(
        training, should_stop=lambda: len(polls) > 3, on_progress=lambda job, seconds: polls.append(seconds)
    )
    with pytest.raises(Interrupted):
        watched.run(job)
    assert json.loads((job.runs[0] / "summary.json").read_text())["ending"] == "stopped"
    runner(training).run(job)
    assert runner(training).is_done(job)


def test_progress_is_told_and_never_above_the_budget(job):
    seen = []
    runner(FakeTraining(), on_progress=lambda job, seconds: seen.append((str(job), seconds))).run(job)
    seconds = [charged for _, charged in seen]
    assert seconds == sorted(seconds)
    assert max(seconds) == 60.0
    assert {name for name, _ in seen} == {"default, seed 1"}


def test_the_most_memory_is_kept_over_stops(job):
    assert peak_bytes(job) is None
    runner(FakeTraining()).run(job)
    assert peak_bytes(job) == 2_000_000_000


def test_a_real_process_is_watched_stopped_and_logged(tmp_path):
    process = TrainProcess(["num_env=3"], tmp_path / "logs/a.log", threads=1)
    while (code := process.poll()) is None:
        assert process.memory_bytes() >= 0
        time.sleep(0.05)
    assert code == 2
    assert (tmp_path / "logs/a.log").read_text() == f"error: {unknown_key('num_env', keys_of(TrainConfig))}\n"
    process.kill()  # which is not there any more


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of the death of their parent")
def test_training_does_not_outlive_a_benchmark_that_is_killed(tmp_path):
    script = f"""
import sys, time
from pathlib import Path
from tdmpc.benchmarks import processes
processes._TRAIN = Path({str(tmp_path / "child.py")!r})
process = processes.TrainProcess([], Path({str(tmp_path / "log")!r}), threads=1)
print(process._process.pid, flush=True)
time.sleep(60)
"""
    (tmp_path / "child.py").write_text("import time; time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.communicate()
    assert _ends(child)


def _ends(process):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if status == "Z":
            return True
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    return False
