import pytest
import torch
from tensordict import TensorDict

from tdmpc.agent.learner import Batch, RunningScale, UpdateNoise, draw_dropout
from tdmpc.agent.settings import discount_factor
from tests.agent.builders import make_agent
from tests.agent.test_planner import randomise


def batch(horizon=3, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        obs=torch.randn(horizon + 1, size, 3, generator=generator),
        action=torch.rand(horizon, size, 2, generator=generator) * 2 - 1,
        reward=torch.rand(horizon, size, 1, generator=generator),
        terminated=torch.zeros(horizon, size, 1),
    )


def noise_for(agent, data):
    shape = data.action.shape
    return UpdateNoise.draw(agent.model, 0.0, shape, torch.Generator().manual_seed(0))


def test_termination_cuts_the_target_and_truncation_does_not():
    agent, data = randomise(make_agent(network={"episodic": True})), batch()
    next_z = agent.model.encode(data.obs[1:])
    noise = noise_for(agent, data)
    # A truncated slice has no mark of its own: its terminated is [0, 0, 0].
    truncated = agent.learner.td_target(next_z, data, noise)
    data.terminated[-1] = 1
    terminated = agent.learner.td_target(next_z, data, noise)
    assert torch.equal(terminated[-1], data.reward[-1])
    assert torch.equal(terminated[:2], truncated[:2])
    assert (truncated[-1] != data.reward[-1]).all()


def test_the_target_is_the_lower_of_two_target_heads_as_drawn():
    agent, data = randomise(make_agent()), batch()
    agent.model.target_q.load_state_dict(randomise(make_agent(), seed=8).model.q.state_dict())
    next_z, noise = agent.model.encode(data.obs[1:]), noise_for(agent, data)
    q = agent.model.q_values(
        agent.model.target_q.layers(), next_z, agent.model.policy_action(next_z, noise.target_action)
    )
    expected = data.reward + agent.discount * q[noise.target_heads].min(0).values
    torch.testing.assert_close(agent.learner.td_target(next_z, data, noise), expected)


def test_initial_weights_are_as_published():
    model = make_agent().model
    for key, value in model.state_dict().items():
        if key.endswith("ln.weight"):
            assert (value == 1).all()
        elif key.endswith("bias") or key in ("reward.2.weight", "q.2.weight", "target_q.2.weight"):
            assert (value == 0).all()
        else:
            assert 0.01 < value.std() < 0.03
            assert value.abs().max() <= 0.2
    for mine, theirs in zip(model.q.parameters(), model.target_q.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_world_loss_moves_all_but_the_policy_and_the_policy_loss_only_the_policy():
    agent = randomise(make_agent(network={"episodic": True}))
    data = batch()
    noise = noise_for(agent, data)
    loss, latents, _ = agent.learner.world_loss(data, noise)
    loss.backward()
    for name, parameter in agent.model.named_parameters():
        trained = not name.startswith(("policy", "target_q"))
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trained, name
    agent.model.zero_grad()
    policy_loss, _ = agent.learner.policy_loss(latents, noise)
    policy_loss.backward()
    for name, parameter in agent.model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == name.startswith("policy"), name


def test_an_update_moves_every_network_and_the_target_a_hundredth_of_the_way():
    agent = randomise(make_agent(network={"episodic": True}))
    before = {key: value.clone() for key, value in agent.model.state_dict().items()}
    metrics = agent.update(TensorDict(batch()._asdict()))
    after = agent.model.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    for key in before:
        if key.startswith("target_q"):
            online = after[key.removeprefix("target_")]
            torch.testing.assert_close(after[key], before[key] + 0.01 * (online - before[key]))
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert agent.lifetime.updates == 1


def test_updates_fit_a_fixed_batch():
    agent, data = make_agent(learner={"lr": 3e-3}), batch(size=32)
    losses = [float(agent.update(TensorDict(data._asdict()))["total_loss"]) for _ in range(150)]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_dropout_factors_keep_the_mean_and_drop_the_share():
    agent = make_agent(network={"mlp_dim": 256})
    noise = UpdateNoise.draw(agent.model, 0.1, torch.Size([3, 64, 2]), torch.Generator().manual_seed(0))
    assert noise.drop is not None
    assert noise.drop.shape == (3, 3 * 64, 256)
    assert (noise.drop == 0).float().mean() == pytest.approx(0.1, abs=0.005)
    assert noise.drop.mean() == pytest.approx(1, abs=0.01)


def test_dropout_factors_are_independent_of_each_other_and_of_where_they_are():
    """Zeros one after another are as frequent as independent draws make them, up to both ends."""
    generator = torch.Generator().manual_seed(0)
    zero = torch.stack([draw_dropout((4, 50), 0.3, generator) == 0 for _ in range(4000)]).view(4000, 200)
    torch.testing.assert_close(zero.float().mean(0), torch.full((200,), 0.3), rtol=0, atol=0.04)
    assert (zero[:, :-1] & zero[:, 1:]).float().mean() == pytest.approx(0.09, abs=0.003)
    assert zero.float().sum(1).var() == pytest.approx(200 * 0.3 * 0.7, rel=0.1)


@pytest.mark.parametrize("p", [1e-6, 0.999])
def test_dropout_factors_have_the_shape_asked_for_however_rare_or_common_zeros_are(p):
    factors = draw_dropout((2, 3), p, torch.Generator().manual_seed(0))
    assert factors.shape == (2, 3)
    assert (factors == 0).all() == (p > 0.5)


def test_running_scale_follows_the_spread_between_percentiles_and_never_falls_below_one():
    scale = RunningScale(tau=0.01)
    scale.update(torch.linspace(0, 0.1, 256))
    assert float(scale.value) == 1
    scale.update(torch.linspace(0, 100, 101))
    assert float(scale.value) == pytest.approx(1 + 0.01 * (90 - 1))


@pytest.mark.parametrize(("length", "expected"), [(500, 0.99), (200, 0.975), (50, 0.95), (10_000, 0.995), (5, 0.95)])
def test_discount_follows_the_episode_length(length, expected):
    assert discount_factor(length, 5, 0.95, 0.995) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 5, 19, 48, 317])
def test_every_model_size_has_about_its_number_of_parameters(size):
    from tdmpc.agent.settings import NetworkSettings, pick
    from tdmpc.agent.world_model import WorldModel
    from tdmpc.config import TrainConfig

    settings = pick(NetworkSettings, TrainConfig(model_size=size), observation_size=39, action_size=4)
    with torch.device("meta"):
        model = WorldModel(settings)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert 0.7 * size < count / 1e6 < 1.3 * size
