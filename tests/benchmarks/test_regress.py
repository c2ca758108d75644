import json
import shlex
from functools import partial
from pathlib import Path

import pytest

from tdmpc.benchmarks import regress
from tdmpc.benchmarks.reference import Measured, Reference, measure, print_comparison
from tdmpc.benchmarks.runner import Runner
from tdmpc.benchmarks.suites import RegressConfig
from tdmpc.command_line import checked_arguments
from tdmpc.commands import TRAIN
from tdmpc.keys import ConfigError
from tests.benchmarks.builders import MACHINE
from tests.benchmarks.fake_training import FakeTraining, eval_row, row


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(training, **keys):
    new_runner = partial(Runner, training, float("inf"), sleep=lambda seconds: None)
    regress.run(RegressConfig(reference="docs/r.json", **keys), (), new_runner)


def reference(curve=((0, 10.0), (2000, 500.0)), speed=10.0, machine=None, task="cup-catch"):
    return Reference(MACHINE | (machine or {}), ["steps=9"], {task: Measured(list(curve), {"training steps/s": speed})})


def compared(capsys, before, now, slower=1.25, band=0.25):
    fine = print_comparison(before, now, slower=slower, band=band)
    return fine, capsys.readouterr().out


def test_without_a_reference_it_says_how_to_make_one_before_anything_runs():
    training = FakeTraining()
    with pytest.raises(ConfigError) as refusal:
        run(training)
    assert str(refusal.value) == (
        "reference=docs/r.json: there is none yet; make one with suite=regress update_reference=true"
    )
    assert training.started == []
    assert list(Path().iterdir()) == []


def test_a_reference_is_made_and_the_same_code_is_not_worse(capsys):
    run(FakeTraining(), update_reference=True)
    content = json.loads(Path("docs/r.json").read_text())
    assert content["tasks"].keys() == set(regress.TASKS)
    assert content["machine"].keys() >= {"cpu", "cores", "threads", "torch", "commit"}
    capsys.readouterr()
    run(FakeTraining())
    output = capsys.readouterr().out
    assert output.endswith("nothing is worse\n")
    assert "not measured alike" not in output


def test_what_got_slower_ends_with_code_1(capsys):
    run(FakeTraining({"regress": 20}), update_reference=True)
    with pytest.raises(SystemExit) as leaving:
        run(FakeTraining({"regress": 10}))
    assert leaving.value.code == 1
    worse = capsys.readouterr().out.splitlines()[-1]
    assert worse.startswith("worse: cartpole-swingup training steps/s")


def test_every_time_is_a_new_one():
    run(FakeTraining(), update_reference=True)
    training = FakeTraining()
    run(training)
    assert [keys["task"] for keys in training.started] == list(regress.TASKS)
    assert all(keys["overwrite"] == "true" for keys in training.started)


def test_a_run_that_fails_ends_it_with_code_1(capsys):
    with pytest.raises(SystemExit) as leaving:
        run(FakeTraining(fails=["regress"]), update_reference=True)
    assert leaving.value.code == 1
    assert "FAILED: exit code 2: error: num_samples: are too many" in capsys.readouterr().out
    assert not Path("docs").exists()


def test_a_plan_is_printed_and_nothing_is_done(capsys):
    run(FakeTraining(), dry=True)
    *commands, estimate = capsys.readouterr().out.splitlines()
    assert len(commands) == 2
    assert estimate == "about 10:00 on two cores"
    for command in commands:
        python, script, *arguments = shlex.split(command)
        assert (python, script) == ("python", "scripts/train.py")
        checked_arguments(TRAIN, arguments)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 1}', '{"format": 9, "machine": {}, "settings": [], "tasks": {}}']
)
def test_a_file_that_is_no_reference_is_refused(content):
    Path("r.json").write_text(content)
    with pytest.raises(ConfigError, match=r"reference=r.json: must be a JSON file that suite=regress wrote in"):
        Reference.read(Path("r.json"))


def test_a_reference_is_read_as_it_was_written():
    before = reference()
    before.write(Path("a/r.json"))
    after = Reference.read(Path("a/r.json"))
    assert dict(after.tasks["cup-catch"].speeds) == {"training steps/s": 10.0}
    assert [tuple(point) for point in after.tasks["cup-catch"].curve] == [(0, 10.0), (2000, 500.0)]


def test_a_run_is_measured_by_its_rows():
    rows = [
        eval_row(0, 0.0, 1.0),
        row("pretrain", 100, 0.0, **{"progress/pretraining_updates": 50}),
        row("train", 300, 40.0),
        eval_row(300, 40.0, 9.0),
    ]
    assert measure(rows) == Measured(
        curve=[(0, 1.0), (300, 9.0)],
        # 50 updates in 5 s; two evaluations of 2 episodes of 50 steps, in 4 s each.
        speeds={"training steps/s": 5.0, "pretraining updates/s": 10.0, "evaluation steps/s": 25.0},
    )


@pytest.mark.parametrize(
    ("value", "verdict", "fine"),
    [(500.0, "the same", True), (254.0, "within the band", True), (253.0, "WORSE", False), (900.0, "better", True)],
)
def test_a_return_may_fall_short_by_a_share_of_the_best(capsys, value, verdict, fine):
    # The best published return of cup-catch is 986, a quarter of it 246.5.
    outcome, output = compared(capsys, reference(), reference([(0, 10.0), (2000, value)]))
    assert outcome is fine
    line = next(line for line in output.splitlines() if "return at step 2000" in line)
    assert verdict in line
    assert ("worse: cup-catch return at step 2000" in output) is not fine


@pytest.mark.parametrize(
    ("speed", "verdict", "fine"), [(8.1, "alike", True), (8.0, "WORSE", False), (12.5, "faster", True)]
)
def test_a_speed_may_fall_by_a_ratio(capsys, speed, verdict, fine):
    outcome, output = compared(capsys, reference(), reference(speed=speed))
    assert outcome is fine
    assert verdict in next(line for line in output.splitlines() if "training steps/s" in line)


def test_what_was_not_measured_is_worse_and_what_is_new_is_not(capsys):
    outcome, output = compared(capsys, reference(), reference([(0, 10.0), (3000, 1.0)]))
    assert not outcome
    assert "worse: cup-catch return at step 2000\n" in output
    assert "not in the reference" in output
    outcome, output = compared(capsys, reference(), reference(task="walker-walk"))
    assert outcome


def test_another_machine_is_said_first(capsys):
    _, output = compared(capsys, reference(), reference(machine={"threads": 7}))
    assert output.splitlines()[0] == "not measured alike: threads 7 (was 2)"
