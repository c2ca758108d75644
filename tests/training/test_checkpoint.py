import shutil
from pathlib import Path

import pytest
import torch

from tdmpc.training.checkpoint import CheckpointError, check_sizes, load_weights, save_weights
from tests.agent.builders import make_agent
from tests.agent.test_learner import batch
from tests.agent.test_planner import randomise

GOLDEN = Path(__file__).parents[1] / "golden"


def test_weights_come_back_as_they_were(tmp_path):
    agent = randomise(make_agent())
    agent.update(batch())
    agent.lifetime.steps = 12
    path = save_weights(tmp_path, 12, agent.weights())
    other = make_agent(seed=5)
    other.load_weights(load_weights(str(tmp_path)))
    assert all(torch.equal(value, other.model.state_dict()[key]) for key, value in agent.model.state_dict().items())
    assert torch.equal(other.learner.scale.value, agent.learner.scale.value)
    assert other.lifetime == agent.lifetime
    assert path == tmp_path / "checkpoints/12/weights.pt"
    assert torch.load(path, weights_only=True)["format"] == 1


def test_file_checkpoint_folder_and_run_directory_name_the_same_weights(tmp_path):
    path = save_weights(tmp_path, 7, make_agent().weights())
    for source in (path, path.parent, tmp_path):
        assert load_weights(str(source))["network"]["latent_dim"] == 16


def test_the_newest_checkpoint_replaces_the_older_ones_and_nothing_half_written_stays(tmp_path):
    for step in (5, 10, 100):
        save_weights(tmp_path, step, make_agent().weights())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["100"]
    assert [path.name for path in (tmp_path / "checkpoints/100").iterdir()] == ["weights.pt"]


@pytest.mark.parametrize("name", ["q2", "q2_episodic", "q5_policy"])
def test_published_files_load(name):
    weights = load_weights(str(GOLDEN / f"{name}.pt"))
    agent = make_agent(network=weights["network"])
    agent.load_weights(weights)
    assert agent.network.observation_size == 11


def refused(source) -> str:
    with pytest.raises(CheckpointError) as refusal:
        load_weights(str(source))
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith(f"checkpoint={source}: ")
    return message


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds no checkpoint" in refused(tmp_path)
    (tmp_path / "text.pt").write_text("no weights")
    assert "cannot be read" in refused(tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds no checkpoint" in refused(tmp_path / "list.pt")
    torch.save({"model": {}}, tmp_path / "empty.pt")
    assert "neither" in refused(tmp_path / "empty.pt")


def test_a_truncated_file_is_refused_in_one_line(tmp_path):
    shutil.copy(GOLDEN / "q2.pt", tmp_path / "cut.pt")
    content = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    assert "cannot be read" in refused(tmp_path / "cut.pt")


def test_a_file_that_would_run_code_is_not_run(tmp_path):
    torch.save({"model": Path("x")}, tmp_path / "pickle.pt")
    assert "cannot be read" in refused(tmp_path / "pickle.pt")


def test_a_published_multi_task_model_is_refused(tmp_path):
    state = torch.load(GOLDEN / "q2.pt", weights_only=True)["model"]
    torch.save({"model": state | {"_task_emb.weight": torch.zeros(3, 96)}}, tmp_path / "mt.pt")
    assert "single-task" in refused(tmp_path / "mt.pt")


def test_other_sizes_are_refused_with_both(tmp_path):
    network = make_agent().weights()["network"]
    with pytest.raises(CheckpointError, match=r"latent_dim 16 \(here 128\), num_q 3 \(here 2\)"):
        check_sizes("x.pt", network, network | {"latent_dim": 128, "num_q": 2})
