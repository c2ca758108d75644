"""What evaluate.py makes of an evaluation."""

import csv
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tdmpc.config import EvaluateConfig
from tdmpc.episodes import check_new_csv, describe_episodes, filming, write_csv
from tdmpc.keys import ConfigError
from tdmpc.runs import evaluate
from tdmpc.seeding import Seeds, Stream
from tdmpc.training.evaluation import Evaluation
from tdmpc.training.weights import weights_file
from tests.agent.builders import make_agent

REPOSITORY = Path(__file__).parents[1]
SEARCH = {"num_samples": 16, "num_elites": 4, "num_pi_trajs": 2, "iterations": 1, "threads": 1}
OUTCOME = Evaluation(np.array([3.0, 5.0, 1.0]), np.array([7, 9, 2]), np.array([False, False, True]), 1.0)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save_agent(path="agent.pt", **network):
    torch.save(weights_file(make_agent(network={"episodic": True, **network}).weights()), path)


def toy(**keys):
    task = {"task": "gym:tests.toys:Toy-v0", "checkpoint": "agent.pt", "eval_episodes": 5}
    return EvaluateConfig(**task | SEARCH | keys)


def lines_of(path):
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def test_every_episode_is_said_and_the_mean_with_its_interval():
    *episodes, mean = describe_episodes(OUTCOME)
    assert episodes[0] == "episode   0  return      3.00  steps 7"
    assert episodes[2].endswith("steps 2  failed")
    assert mean.startswith("mean 3.00  95 % interval 1.00 to 5.00  std 1.63  episodes 3")


def test_one_episode_has_no_interval():
    one = Evaluation(np.array([3.0]), np.array([7]), np.array([False]), 1.0)
    assert list(describe_episodes(one))[-1] == "mean 3.00  std 0.00  episodes 1"


def test_the_file_has_a_line_an_episode_with_the_seed_that_repeats_it():
    write_csv("a.csv", OUTCOME, Seeds(4), round=0)
    first, _, last = lines_of("a.csv")
    assert first == {
        **{"episode": "0", "seed": str(Seeds(4).integer(Stream.EVAL_EPISODE, 0, 0))},
        **{"episode_reward": "3.0", "episode_length": "7", "failed": "0"},
    }
    assert last["failed"] == "1"


def test_a_file_is_never_overwritten():
    Path("a.csv").write_text("mine")
    for refuse in (lambda: check_new_csv("a.csv"), lambda: write_csv("a.csv", OUTCOME, Seeds(1), 0)):
        with pytest.raises(ConfigError, match=r"csv=a.csv: exists already; must be a new file"):
            refuse()
    assert Path("a.csv").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"csv=a.csv/b.csv: must be in a folder that can be made \(File exists\)"):
        check_new_csv("a.csv/b.csv")


def test_an_evaluation_writes_what_it_prints(capsys):
    save_agent()
    evaluate(toy(csv="new/a.csv", num_envs=2))
    output = capsys.readouterr().out
    for line in lines_of("new/a.csv"):
        assert f"return {float(line['episode_reward']):>9.2f}  steps {line['episode_length']}" in output
    assert "95 % interval" in output
    assert output.endswith("wrote new/a.csv\n")


def test_the_same_checkpoint_and_seed_give_the_same_numbers():
    save_agent()
    for name, keys in {"a": {}, "b": {}, "seed": {"seed": 2}, "policy": {"mpc": False}}.items():
        evaluate(toy(csv=f"{name}.csv", num_envs=3, **keys))
    files = {name: Path(f"{name}.csv").read_text() for name in ("a", "b", "seed", "policy")}
    assert files["a"] == files["b"]
    assert len(set(files.values())) == 3


def test_a_used_file_is_refused_before_anything_is_evaluated(capsys):
    Path("a.csv").touch()
    save_agent()
    with pytest.raises(ConfigError, match=r"csv=a.csv: exists already"):
        evaluate(toy(csv="a.csv"))
    assert capsys.readouterr().out == ""


def test_without_a_picture_there_is_a_warning_and_no_video(capsys):
    save_agent()
    evaluate(toy(save_video=True, eval_episodes=1))
    assert "warning: save_video=true: no video will be made" in capsys.readouterr().out
    assert not list(Path().rglob("*.mp4"))


def test_a_used_video_is_refused():
    class Envs:
        render_fps = 30

    Path("videos").mkdir()
    Path("videos/4000.mp4").touch()
    with ExitStack(), pytest.raises(ConfigError, match=r"video_dir=videos: holds 4000.mp4 already; must be another"):
        filming(Envs(), "videos", 4000)  # pyright: ignore[reportArgumentType]


def test_the_first_episode_is_filmed_into_the_directory_that_is_given():
    """In a process of its own, for OpenGL is chosen once a process."""
    save_agent(observation_size=4, action_size=1, episodic=False)
    task = ["task=gym:InvertedPendulum-v5", "env.max_episode_steps=20", "checkpoint=agent.pt", "eval_episodes=2"]
    arguments = [*task, "save_video=true", "video_dir=films", *(f"{name}={value}" for name, value in SEARCH.items())]
    environment = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPOSITORY / "scripts/evaluate.py"), *arguments, "mpc=false"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    if "no video will be made" in result.stdout:
        pytest.skip("nothing here can draw")
    assert "video: films/0.mp4" in result.stdout
    assert [str(path) for path in Path("films").iterdir()] == ["films/0.mp4"]
    assert Path("films/0.mp4").stat().st_size > 1000
