import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tdmpc.training.weights import CheckpointError, check_sizes, load_weights, weights_file
from tests.agent.builders import make_agent
from tests.agent.test_learner import batch
from tests.agent.test_planner import randomise

GOLDEN = Path(__file__).parents[1] / "golden"


def save(run, step, agent):
    path = run / "checkpoints" / str(step) / "weights.pt"
    path.parent.mkdir(parents=True)
    torch.save(weights_file(agent.weights()), path)
    return path


def test_weights_come_back_as_they_were(tmp_path):
    agent = randomise(make_agent())
    agent.update(TensorDict(batch()._asdict()))
    agent.lifetime.steps = 12
    path = save(tmp_path, 12, agent)
    other = make_agent(seed=5)
    other.load_weights(load_weights(str(tmp_path)))
    assert all(torch.equal(value, other.model.state_dict()[key]) for key, value in agent.model.state_dict().items())
    assert torch.equal(other.learner.scale.value, agent.learner.scale.value)
    assert other.lifetime == agent.lifetime
    assert path == tmp_path / "checkpoints/12/weights.pt"
    assert torch.load(path, weights_only=True)["format"] == 1


def test_file_checkpoint_folder_and_run_directory_name_the_same_weights(tmp_path):
    path = save(tmp_path, 7, make_agent())
    for source in (path, path.parent, tmp_path):
        assert load_weights(str(source))["network"]["latent_dim"] == 16


def test_a_run_directory_stands_for_its_newest_checkpoint_that_is_complete(tmp_path):
    for step in (5, 100, 20):
        agent = make_agent()
        agent.lifetime.steps = step
        save(tmp_path, step, agent)
    (tmp_path / "checkpoints/200.part").mkdir()
    (tmp_path / "checkpoints/300").mkdir()
    assert load_weights(str(tmp_path))["lifetime"]["steps"] == 100


def test_the_first_published_files_number_the_tensors_of_the_q_heads(tmp_path):
    state = torch.load(GOLDEN / "q2.pt", weights_only=True)["model"]
    tensors = ("weight", "bias", "ln.weight", "ln.bias")
    old = {}
    for key, value in state.items():
        for prefix, numbered in (("_Qs.params.", "_Qs.params."), ("_target_Qs_params.", "_target_Qs.params.")):
            if key.startswith(prefix):
                layer, tensor = key.removeprefix(prefix).split(".", 1)
                old[f"{numbered}{int(layer) * 4 + tensors.index(tensor)}"] = value
        if not key.startswith(("_Qs", "_target", "_detach", "log_std")):
            old[key] = value
    torch.save({"model": old}, tmp_path / "old.pt")
    new, old = load_weights(str(GOLDEN / "q2.pt")), load_weights(str(tmp_path / "old.pt"))
    assert all(torch.equal(value, old["model"][key]) for key, value in new["model"].items())
    assert old["network"]["log_std_max"] == 2  # the default, as those files do not tell


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
    contents = [{"model": {}}, {"model": None}, {"model": torch.zeros(3)}, {0: 1}, {"format": 1}, {}]
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / f"{number}.pt")
        assert "neither" in refused(tmp_path / f"{number}.pt")
    for text in ("step,episode_reward\n0,1.0\n", "hello", "\x80\x04", ""):
        (tmp_path / "text.pt").write_text(text)
        assert "cannot be read" in refused(tmp_path / "text.pt")


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
