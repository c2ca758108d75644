import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tdmpc.benchmarks import page, wallclock
from tdmpc.benchmarks.outcomes import read_outcome, speedup
from tdmpc.benchmarks.plan import make_plan
from tdmpc.benchmarks.runner import Runner
from tdmpc.benchmarks.suite_bar import SuiteBar
from tdmpc.benchmarks.suites import WallclockConfig
from tdmpc.keys import ConfigError
from tests.benchmarks.fake_training import FakeTraining

REPOSITORY = Path(__file__).parents[2]
TASK = "gym:tests.toys:Toy-v0"
FILES = {"results.csv", "table.md", "report.html", "return_vs_wallclock.png", "return_vs_steps.png", "time_shares.png"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder_without_pictures(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(page, "draw", lambda results, out: [])


@pytest.fixture
def pictures():
    """Have the pictures drawn, which takes longer than all else."""


def run(training, *base, budget_s=60.0, on_poll=lambda: None, **keys):
    settings = {"task": TASK, "variants": ("default", "vectorized"), "seeds": (1, 2), "out": "out"} | keys
    config = WallclockConfig(**settings, budget_minutes=budget_s / 60)
    wallclock.run(config, base, partial(Runner, training, budget_s, sleep=lambda seconds: on_poll()))


def results(out="out"):
    return list(csv.DictReader(io.StringIO(Path(out, "results.csv").read_text())))


def table(out="out"):
    """Return the lines of the table of variants by their name, cells by the head."""
    head, _, *lines = Path(out, "table.md").read_text().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    return {line[0]: dict(zip(cells[0], line, strict=True)) for line in cells[1:]}


def test_all_variants_run_one_seed_before_the_next_and_everything_is_written(capsys, pictures):
    training = FakeTraining({"vectorized": 40})
    run(training)
    assert training.order == [("default", 1), ("vectorized", 1), ("default", 2), ("vectorized", 2)]
    assert {path.name for path in Path("out").iterdir()} >= FILES | {"runs", "logs"}
    assert [line["status"] for line in results()] == ["done"] * 4
    output = capsys.readouterr().out
    assert "3/4 default, seed 2: starts" in output
    assert "wrote out/report.html" in output


def test_a_run_and_a_variant_are_summed_up_at_the_budget():
    run(FakeTraining({"default": 10, "vectorized": 40}), best=20, budget_s=61.0)
    line = results()[0]
    # 6 s of seeding and pretraining, 55 s of training at 10 steps a second, from step 100 on.
    assert float(line["steps"]) == 650
    assert float(line["final_return"]) == 6.5
    assert float(line["steps_per_s"]) == 10
    # Half of the way from 0 to 20 are 1000 steps, which the default does not make.
    assert line["time_to_50_s"] == ""
    assert float(results()[1]["time_to_50_s"]) == pytest.approx(6 + 900 / 40)
    assert float(line["compiling_s"]) == 7
    assert line["peak_bytes"] == "2000000000"
    assert table()["default"] == {
        **{"variant": "default", "runs": "2", "steps": "650", "return": "6.5 (6 to 6)", "min to 50 %": "-"},
        **{"min to 80 %": "-", "min to 95 %": "-", "steps/s": "10.0", "speed-up": "1", "memory": "2.00 GB"},
    }
    assert table()["vectorized"]["speed-up"] == "4.00 [4.00, 4.00] in steps/s"


def test_variants_are_compared_by_the_time_to_80_percent_where_all_runs_reach_it():
    run(FakeTraining({"default": 10, "vectorized": 40}), best=5, budget_s=61.0)
    speed = table()["vectorized"]["speed-up"]
    assert speed.endswith("in time to 80 %")
    # 4 of 5 are evaluated by the default after 36 s, by the other within 16 s, between 0 and 5.
    assert float(speed.split()[0]) == pytest.approx(36 / (16 * 4 / 5), abs=0.01)


def test_a_single_seed_has_no_interval():
    run(FakeTraining(), seeds=1)
    assert re.fullmatch(r"[\d.]+ in .*", table()["vectorized"]["speed-up"])


def test_the_speed_up_is_over_the_seeds_that_both_have():
    run(FakeTraining({"vectorized": 20}), seeds=(1, 2), best=1000)
    plan = make_plan(WallclockConfig(task=TASK, seeds=(1, 2), out="out"), (), 2)
    outcomes = {str(job): read_outcome(job, 60.0) for job in plan.jobs}
    first = [outcomes["default, seed 1"], outcomes["default, seed 2"]]
    gain = speedup([one for one in first if one], [one for one in [outcomes["vectorized, seed 2"]] if one], None)
    assert gain is not None
    assert (gain.ratio, gain.interval, gain.measure) == (2, None, "steps/s")
    assert speedup([], [one for one in first if one], None) is None


def test_a_failed_variant_is_reported_and_does_not_stop_the_others(capsys):
    training = FakeTraining(fails=["default"])
    with pytest.raises(SystemExit) as leaving:
        run(training)
    assert leaving.value.code == 1
    assert [line["status"] for line in results()] == ["failed", "done", "failed", "done"]
    assert "1/4 default, seed 1: FAILED, exit code 2: error: num_samples: are too many" in capsys.readouterr().out
    assert "FAILED: default, seed 2: exit code 2: error: num_samples: are too many" in Path("out/table.md").read_text()
    assert "num_samples: are too many" in Path("out/report.html").read_text()
    assert table()["default"]["runs"] == "0 of 2"
    training.fails.clear()
    run(training)
    assert [line["status"] for line in results()] == ["done"] * 4


def test_nothing_that_works_is_no_reason_to_stop_without_a_table():
    with pytest.raises(SystemExit):
        run(FakeTraining(fails=["default", "vectorized"]))
    assert [line["status"] for line in results()] == ["failed"] * 4
    assert Path("out/report.html").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_saves_the_run_under_way_and_the_same_command_goes_on(capsys, number, code):
    polls, first = [], FakeTraining()

    def stop_in_the_second_run():
        polls.append(1)
        if len(polls) == 10:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as leaving:
        run(first, on_poll=stop_in_the_second_run)
    assert leaving.value.code == code
    assert first.order == [("default", 1), ("vectorized", 1)]
    assert [line["status"] for line in results()] == ["done", "open", "open", "open"]
    assert "stopped; the same command continues" in capsys.readouterr().out
    second = FakeTraining()
    run(second)
    assert second.order == [("vectorized", 1), ("default", 2), ("vectorized", 2)]
    output = capsys.readouterr().out
    assert "1/4 default, seed 1: done before" in output
    assert "2/4 vectorized, seed 1: goes on" in output
    assert [line["status"] for line in results()] == ["done"] * 4


def test_a_run_that_dies_is_taken_up_by_the_same_command():
    with pytest.raises(SystemExit):
        run(FakeTraining(dies_after=3))
    assert results()[0]["status"] == "failed"
    again = FakeTraining()
    run(again)
    assert again.order == [("default", 1)]
    assert [line["status"] for line in results()] == ["done"] * 4


def test_more_seeds_variants_and_minutes_go_on_from_what_there_is():
    run(FakeTraining(), seeds=1)
    training = FakeTraining()
    run(training, variants=("default", "vectorized", "policy_only"), seeds=(1, 2))
    assert ("default", 1) not in training.order
    assert len(training.order) == 4
    longer = FakeTraining()
    run(longer, seeds=1, budget_s=120.0)
    assert longer.order == [("default", 1), ("vectorized", 1)]


@pytest.mark.parametrize(
    ("base", "keys", "message"),
    [
        (["model_size=1"], {}, "out=out: holds a benchmark with base ["),
        ([], {"threads": 7}, "out=out: holds a benchmark with threads 3, here 7; choose another out"),
        (
            [],
            {"variants": "default=[num_envs=2]"},
            "out=out: holds a benchmark with default [experiment=default], here [",
        ),
        ([], {"task": "gym:Pendulum-v1"}, f"out=out: holds a benchmark with task {TASK}, here gym:Pendulum-v1"),
    ],
)
def test_another_benchmark_in_the_same_folder_is_refused(base, keys, message):
    run(FakeTraining(), seeds=1, threads=3)
    with pytest.raises(ConfigError) as refusal:
        run(FakeTraining(), *base, **({"seeds": 1, "threads": 3} | keys))
    assert str(refusal.value).startswith(message)


def test_two_benchmarks_never_share_a_folder():
    with wallclock.claimed(Path("out")), pytest.raises(ConfigError, match="out=out: another process writes there"):
        run(FakeTraining())
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"out=file: cannot be written to \(File exists\)"):
        run(FakeTraining(), out="file")


def test_a_plan_is_printed_with_an_estimate_and_nothing_is_done(capsys):
    training = FakeTraining()
    run(training, dry=True)
    output = capsys.readouterr().out
    assert "4 runs of gym:tests.toys:Toy-v0, 1 minutes of training each, into out" in output
    assert output.count("python scripts/train.py ") == 4
    assert "4 of 4 runs are left: 4:00 of training, in all about 6:00, if compiling and evaluating take" in output
    assert training.started == []
    assert list(Path().iterdir()) == []
    run(training, seeds=1)
    run(training, dry=True)
    # A run of 60 s took 66 s of training, 8 s before it and 4 s for each of 5 evaluations.
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"2 of 4 runs are left: 2:00 of training, in all about 2:[45]\d, as the 2 before took", line)


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_the_report_is_one_self_contained_page(pictures):
    run(FakeTraining({"vectorized": 40}), "model_size=1", seeds=1)
    page, text = Links(), Path("out/report.html").read_text()
    page.feed(text)
    assert page.tags.count("img") == 3
    assert page.tags.count("table") == 4
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert not {"link", "script"} & set(page.tags)
    for shown in ("steps_per_update", "c0ffee", "experiment=vectorized", "model_size=1", "torch", "threads", "cpu"):
        assert shown in text
    assert text.count("python scripts/train.py") == 2


def test_workers_that_merge_count_together():
    pair = "pair=[merge=mean,merge.workers=2,merge.control=false]"
    run(FakeTraining({"pair": 10}), variants=("default", pair), seeds=1, best=1000, budget_s=61.0)
    assert float(results()[1]["steps"]) == 1300
    assert float(results()[1]["final_return"]) == 6.5
    assert table()["pair"]["speed-up"] == "2.00 in steps/s"
    assert "Of workers that merge" in Path("out/table.md").read_text()


def test_the_bar_knows_how_long_it_will_take():
    now = [0.0]
    bar = SuiteBar(400.0, 100.0, io.StringIO(), lambda: now[0])
    assert bar.eta_s == pytest.approx(1.5 * 300)
    now[0] = 80.0
    bar.advance(140.0, "default, seed 1")
    assert bar.eta_s == pytest.approx(260 * 80 / 40)
    bar.close()


@pytest.mark.slow
def test_two_variants_are_really_trained_and_compared():
    tiny = [
        *("enc_dim=16", "mlp_dim=16", "latent_dim=16", "num_bins=21", "iterations=1", "num_samples=16", "num_elites=4"),
        *("num_pi_trajs=2", "batch_size=8", "buffer_size=10000", "seed_steps=40", "eval_episodes=1", "eval_freq=200"),
        *("log_freq=20", "compile=false", "model_size=1", "threads=1"),
    ]
    suite = ["suite=wallclock", "task=gym:Pendulum-v1", "seeds=1", "budget_minutes=0.1", "out=out"]
    variants = "variants=[default,'wide=[num_envs=4,steps_per_update=4]']"
    command = [sys.executable, str(REPOSITORY / "scripts/benchmark.py"), *suite, variants, *tiny]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert {path.name for path in Path("out").iterdir()} >= FILES
    for line in results():
        assert line["status"] == "done"
        charged = sum(float(line[f"{phase}_s"]) for phase in ("seeding", "pretraining", "training", "merging"))
        assert 6 <= charged < 60
        assert float(line["steps"]) > 40
        assert float(line["final_return"]) < 0
        assert float(line["peak_bytes"]) > 1e8
        summary = json.loads(Path(line["directory"], "summary.json").read_text())
        assert summary["ending"] == "finished"
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 2
