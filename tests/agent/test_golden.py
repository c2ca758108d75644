"""The agent against inputs and outputs of the published implementation (tests/golden/README.md)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tdmpc.agent.learner import Batch, UpdateNoise
from tdmpc.agent.official import from_published, to_published
from tdmpc.agent.settings import discount_factor
from tests.agent.builders import imagine, make_agent

GOLDEN = Path(__file__).parents[1] / "golden"


class Golden:
    """One golden file and an agent with its weights."""

    def __init__(self, name):
        self.arrays = {key: torch.from_numpy(np.array(value)) for key, value in np.load(GOLDEN / f"{name}.npz").items()}
        self.published = torch.load(GOLDEN / f"{name}.pt", weights_only=True)["model"]
        weights = from_published(self.published)
        self.agent = make_agent(
            network=weights["network"],
            learner={"dropout": 0.0, "entropy_coef": 0.0},
            discount=float(self.arrays["out/discount"]),
        )
        self.agent.load_weights(weights)
        self.model = self.agent.model
        latent_dim = self.agent.network.latent_dim
        # Our latent features are the published ones in this order.
        self.order = torch.arange(latent_dim).view(-1, 8).T.flatten()

    def __getitem__(self, key):
        return self.arrays[key]

    @property
    def batch(self):
        return Batch(*(self[f"batch/{key}"] for key in Batch._fields))

    @property
    def noise(self):
        """No noise at all: the golden policies have a standard deviation of 4.5e-5."""
        horizon, batch, action_size = self["batch/action"].shape
        heads = torch.tensor([0, 1])
        return UpdateNoise(
            torch.zeros(horizon, batch, action_size),
            heads,
            None,
            torch.zeros(horizon + 1, batch, action_size),
            heads,
        )


@pytest.fixture(params=["q2", "q2_episodic", "q5_policy"])
def golden(request):
    return Golden(request.param)


@pytest.fixture(params=["q2", "q2_episodic"])
def trainable(request):
    return Golden(request.param)


def close(actual, expected, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, check_dtype=False)


def test_forward_passes_are_the_published_ones(golden):
    model, z = golden.model, golden["out/encode"][..., golden.order]
    action = golden["batch/action"]
    close(model.encode(golden["batch/obs"]), z)
    close(model.next(z[:-1], action), golden["out/next"][..., golden.order])
    reward_logits = model.reward_logits(z[:-1], action)
    close(reward_logits, golden["out/reward_logits"])
    close(model.two_hot.decode(reward_logits), golden["out/reward_value"])
    close(model.q_logits(model.q.layers(), z[:-1], action), golden["out/q_logits"])
    close(model.q_values(model.q.layers(), z[:-1], action), golden["out/q_value"], rtol=1e-4)
    close(model.q_logits(model.target_q.layers(), z[:-1], action), golden["out/target_q_logits"])
    mean, log_std = model.policy_distribution(z)
    close(mean.tanh(), golden["out/pi_mean"])
    close(log_std, golden["out/pi_log_std"])


def test_termination_logits_are_the_published_ones():
    golden = Golden("q2_episodic")
    z = golden["out/encode"][..., golden.order]
    close(golden.model.termination_logits(z), golden["out/termination_logits"])


def test_policy_samples_and_their_entropy_are_the_published_ones():
    golden = Golden("q5_policy")
    sample = golden.model.policy_sample(golden["out/encode"][..., golden.order], golden["in/pi_eps"])
    close(sample.action, golden["out/pi_action"])
    close(sample.entropy, golden["out/pi_entropy"], rtol=1e-4, atol=1e-4)
    close(sample.scaled_entropy, golden["out/pi_scaled_entropy"], rtol=1e-4, atol=1e-4)


def test_two_hot_codes_are_the_published_ones(golden):
    two_hot, scalars = golden.model.two_hot, golden["in/two_hot_scalar"]
    logits = torch.randn(2, len(scalars), two_hot.num_bins, generator=torch.Generator().manual_seed(0))
    expected = -(golden["out/two_hot"] * logits.log_softmax(-1)).sum(-1, keepdim=True)
    close(two_hot.cross_entropy(logits, scalars), expected, rtol=1e-4, atol=1e-3)


def test_discount_of_500_steps_is_the_published_one(golden):
    assert discount_factor(500, 5, 0.95, 0.995) == pytest.approx(float(golden["out/discount"]))


def test_td_target_is_the_published_one(trainable):
    next_z = trainable.model.encode(trainable["batch/obs"][1:])
    target = trainable.agent.learner.td_target(next_z, trainable.batch, trainable.noise)
    close(target, trainable["out/td_target"], rtol=1e-4, atol=1e-4)


def test_values_of_planned_trajectories_are_the_published_ones(trainable):
    imagination = imagine(trainable.agent)
    actions = trainable["in/plan_actions"].transpose(0, 1).unsqueeze(0)  # [E=1, N, H, A]
    z0 = trainable["in/plan_z0"][:, trainable.order]
    end = imagination.roll_actions(imagination.share(z0), actions)
    noise = torch.zeros(1, *actions.shape[1:2], actions.shape[-1])
    value = imagination.value(end, 3, torch.tensor([0, 1]), noise)
    close(value[0], trainable["out/plan_value"].squeeze(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("updates", [1, 5])
def test_losses_and_weights_after_updates_are_the_published_ones(trainable, updates):
    for _ in range(updates):
        metrics = trainable.agent.learner.update(trainable.batch, trainable.noise)
    for name, value in metrics.items():
        if name == "pi_entropy":  # the density of so narrow a policy magnifies the noise that was left out
            continue
        if name == "pi_scaled_entropy":
            continue
        close(value, trainable[f"update{updates}/{name}"], rtol=1e-3, atol=1e-4)
    published = {key: value for key, value in trainable.arrays.items() if key.startswith(f"after{updates}/")}
    expected = from_published({key.split("/")[1]: value for key, value in published.items()})
    before = from_published(trainable.published)["model"]
    for key, value in trainable.model.state_dict().items():
        # Compare the way that the weights have gone, not where they are: they have hardly moved.
        change, expected_change = value - before[key], expected["model"][key] - before[key]
        scale = expected_change.abs().max()
        assert (change - expected_change).abs().mean() <= 0.01 * scale, key


def test_published_weights_survive_the_way_in_and_out(golden):
    exported = to_published(golden.agent.weights())
    for key, value in exported.items():
        close(value, golden.published[key], rtol=0, atol=1e-6)
    missing = set(golden.published) - set(exported)
    # What is missing are the published code's further copies of the Q heads.
    assert all(".module." in key for key in missing)


def test_sizes_are_read_off_the_published_shapes(golden):
    network = golden.agent.network
    assert (network.observation_size, network.action_size) == (11, 3)
    assert (network.enc_dim, network.mlp_dim, network.latent_dim, network.num_enc_layers) == (24, 40, 32, 2)
    assert network.num_bins == 101
    assert network.episodic == any(key.startswith("_termination") for key in golden.published)
