import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.plot import main
from tdmpc.telemetry.history import HistoryError
from tdmpc.telemetry.plots import plot_runs

REPOSITORY = Path(__file__).parents[2]
FILES = ["return_vs_steps.png", "return_vs_wallclock.png", "losses.png", "time_shares.png", "rates.png"]
EVAL = {"kind": "eval", "step": 0, "elapsed_s": 2.0, "eval/episode_reward": 3.0}
LOSS = {"kind": "train", "step": 500, "elapsed_s": 9.0, "train/total_loss": 0.5}


def full_rows(seed=1):
    for window in range(4):
        step, elapsed_s = 1000 * window + seed, 30.0 * window + seed
        yield {"kind": "eval", "step": step, "elapsed_s": elapsed_s, "eval/episode_reward": 100.0 * window}
        yield {
            "kind": "train",
            "step": step + 500,
            "elapsed_s": elapsed_s + 15,
            "train/episode_reward": 90.0 * window,
            "train/total_loss": 10.0**-window,
            "train/pi_loss": -1.0 * window,
            "rate/steps_per_s": 33.0,
            "rate/updates_per_s": 8.0,
            "time/act/share": 0.25,
            "time/act/plan/share": 0.2,
            "time/update/share": 0.5,
            "time/other/share": 0.25,
        }


def write_run(root, rows, task="walker-walk", exp_name="default", seed=1):
    directory = root / "runs" / task / exp_name / f"seed-{seed}"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.yaml").write_text(yaml.safe_dump({"task": task, "exp_name": exp_name, "seed": seed}))
    return directory


def drawn(directory):
    return sorted(path.name for path in directory.glob("*.png") if path.read_bytes().startswith(b"\x89PNG"))


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert output.err.startswith("error: ")
    return output.err


def test_one_run_is_drawn_into_its_own_directory(tmp_path, capsys):
    run = write_run(tmp_path, full_rows())
    main([str(run)])
    assert drawn(run) == sorted(FILES)
    assert capsys.readouterr().out.splitlines() == [f"wrote {run / file}" for file in FILES]


def test_several_runs_are_drawn_into_plots_of_the_current_directory(tmp_path, monkeypatch):
    seeds = [write_run(tmp_path, full_rows(seed), seed=seed) for seed in (1, 2)]
    other = write_run(tmp_path, full_rows(), exp_name="other")
    monkeypatch.chdir(tmp_path)
    main([str(run) for run in (*seeds, other)])
    assert drawn(tmp_path / "plots") == sorted(FILES)
    assert not any(drawn(run) for run in (*seeds, other))


def test_out_says_where(tmp_path):
    run = write_run(tmp_path, [LOSS])
    main([str(run), "--out", str(tmp_path / "a" / "b")])
    assert drawn(tmp_path / "a" / "b") == ["losses.png"]
    assert drawn(run) == []


def test_a_picture_without_data_is_skipped_with_a_line(tmp_path, capsys):
    run = write_run(tmp_path, [LOSS])
    main([str(run)])
    assert drawn(run) == ["losses.png"]
    assert capsys.readouterr().out.splitlines() == [
        "skipped return_vs_steps.png: no evaluations to draw yet",
        "skipped return_vs_wallclock.png: no evaluations to draw yet",
        "skipped time_shares.png: no timed sections to draw yet",
        "skipped rates.png: no rates to draw yet",
        f"wrote {run / 'losses.png'}",
    ]


def test_runs_without_data_for_a_picture_are_named(tmp_path):
    runs = [write_run(tmp_path, [LOSS]), write_run(tmp_path, full_rows(), exp_name="other")]
    plotted = plot_runs(runs, tmp_path)
    assert [path.name for path in plotted.written] == FILES
    assert plotted.notes[0] == "left out of return_vs_steps.png: default, no evaluations to draw yet"
    assert len(plotted.notes) == 4


def test_a_torn_last_line_does_not_matter(tmp_path):
    run = write_run(tmp_path, [EVAL])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 10')
    assert [path.name for path in plot_runs([run], tmp_path).written] == FILES[:2]


@pytest.mark.parametrize(
    ("rows", "legend"),
    [
        ({"default": 1}, []),
        ({"default": 2}, ["mean and min–max of 2 runs"]),
        ({"default": 2, "other": 1}, ["default: mean and min–max of 2 runs", "other"]),
    ],
)
def test_only_several_runs_have_a_legend(tmp_path, monkeypatch, rows, legend):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: figures.append(figure))
    names = [(exp_name, seed) for exp_name, seeds in rows.items() for seed in range(seeds)]
    plot_runs([write_run(tmp_path, [LOSS], exp_name=name, seed=seed) for name, seed in names], tmp_path)
    assert [text.get_text() for box in figures[0].legends for text in box.get_texts()] == legend


def test_values_far_apart_have_a_logarithmic_axis_and_a_single_training_episode_a_mark(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: figures.append(figure))
    rates = [{**LOSS, "step": step, "rate/steps_per_s": rate} for step, rate in ((500, 3000.0), (1000, 20.0))]
    plot_runs([write_run(tmp_path, [EVAL, *rates, {**LOSS, "train/episode_reward": 1.0}])], tmp_path)
    returns, *_, (rate_axes,) = [figure.axes for figure in figures]
    assert rate_axes.get_yscale() == "log"
    assert [line.get_marker() for line in returns[0].lines] == ["o", "o"]


def test_a_run_named_twice_counts_once(tmp_path, monkeypatch):
    run = write_run(tmp_path, full_rows())
    monkeypatch.chdir(run)
    seen = []
    monkeypatch.setattr("tdmpc.telemetry.plots.group_seeds", lambda runs: seen.extend(runs) or ("", []))
    with pytest.raises(HistoryError):
        plot_runs([run, Path()], tmp_path)
    assert len(seen) == 1


def write_worker(root, worker, rows=(EVAL, LOSS), control=True):
    run = write_run(root, rows, seed=f"1/worker-{worker}")
    merge = {"strategy": "mean", "worker": worker, "control": control}
    (run / "config.yaml").write_text(yaml.safe_dump({"task": "walker-walk", "exp_name": "default", "merge": merge}))
    return run.parent


def test_the_directory_of_a_group_stands_for_its_workers_with_the_control_in_a_look_of_its_own(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: figures.append(figure))
    for worker in (10, 0, 2):
        group = write_worker(tmp_path, worker)
    plot_runs([group], tmp_path)
    (axes,) = figures[0].axes
    looks = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes.lines}
    control, merged = looks["control"], looks["merge=mean: mean and min–max of 2 runs"]
    assert control[0] != merged[0]
    assert control[1] != merged[1]


def test_without_a_control_worker_0_is_one_of_the_others(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("tdmpc.telemetry.plots.group_seeds", lambda runs: seen.extend(runs) or ("", []))
    for worker in (0, 1):
        group = write_worker(tmp_path, worker, control=False)
    with pytest.raises(HistoryError):
        plot_runs([group, group / "worker-1"], tmp_path)
    assert [run.role for run in seen] == ["merge=mean"] * 2


def test_the_pictures_of_a_group_are_in_its_directory(tmp_path):
    group = write_worker(tmp_path, 0)
    main([str(group)])
    assert "losses.png" in drawn(group)


def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path, capsys):
    assert "nowhere: there is no such directory" in refusal(capsys, tmp_path / "nowhere")
    assert f"{tmp_path}: holds no metrics.jsonl" in refusal(capsys, tmp_path)
    assert "required: RUN_DIR; --help" in refusal(capsys)
    assert "--width" in refusal(capsys, tmp_path, "--width")


def test_a_run_without_rows_is_refused_in_one_line_and_leaves_nothing_behind(tmp_path, capsys):
    run = write_run(tmp_path, [])
    message = refusal(capsys, run, "--out", tmp_path / "plots")
    assert message == "error: nothing to draw yet: no evaluations, no losses, no timed sections, no rates\n"
    assert not (tmp_path / "plots").exists()


def test_a_file_in_the_way_is_one_line(tmp_path, capsys):
    run = write_run(tmp_path, [EVAL])
    assert "metrics.jsonl" in refusal(capsys, run, "--out", run / "metrics.jsonl")


def test_the_script_explains_itself_without_matplotlib():
    code = (
        "import sys, scripts.plot as plot\ntry: plot.main(['--help'])\nfinally: assert 'matplotlib' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "RUN_DIR" in result.stdout
    assert "--out DIR" in result.stdout
    assert result.stderr == ""
