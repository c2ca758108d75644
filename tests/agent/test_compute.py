"""Compiled and in bfloat16, the agent stays the agent that the other tests are about."""

import pytest
import torch
from tensordict import TensorDict

from tdmpc.agent.compute import EAGER, Compute
from tests.agent.builders import imagine, make_agent
from tests.agent.test_golden import Golden
from tests.agent.test_learner import batch
from tests.agent.test_planner import randomise

BF16 = Compute(torch.bfloat16, torch.bfloat16)
COMPILED = Compute(compile=True)


def using(compute, **settings):
    agent = randomise(make_agent(compute=compute, **settings))
    # Weights of a size at which values are spread, but no policy is saturated.
    for parameter in agent.model.parameters():
        parameter.data.mul_(0.4)
    return agent


def act(agent, state, num_envs=2):
    obs = torch.linspace(-1, 1, 3 * num_envs).view(num_envs, 3)
    return agent.act(obs, state, torch.ones(num_envs, dtype=torch.bool), explore=True)


def update(agent, times=1):
    return [agent.update(TensorDict(batch(size=16)._asdict())) for _ in range(times)]


@pytest.mark.parametrize("name", ["q2", "q2_episodic", "q5_policy"])
def test_plan_values_in_bfloat16_are_within_two_percent(name):
    golden = Golden(name)
    z0 = torch.randn(3, golden["batch/obs"].shape[-1], generator=torch.Generator().manual_seed(0))
    z0 = golden.model.encode(z0)
    actions = torch.rand(3, 200, 3, golden["batch/action"].shape[-1]) * 2 - 1
    noise, heads = torch.zeros_like(actions[:, :, 0]), torch.tensor([0, 1])

    def values(dtype):
        imagination = imagine(golden.agent, dtype)
        return imagination.value(imagination.roll_actions(imagination.share(z0), actions), 3, heads, noise)

    exact, rounded = values(torch.float32), values(torch.bfloat16)
    assert not torch.equal(exact, rounded)
    assert (rounded - exact).abs().mean() <= 0.02 * exact.abs().mean()


def test_first_actions_chosen_in_bfloat16_are_distributed_as_in_float32():
    num_envs, planner = 400, {"iterations": 4, "num_samples": 64, "num_elites": 8}
    obs, first = torch.tensor([[0.3, -0.7, 0.1]]).expand(num_envs, 3), torch.ones(num_envs, dtype=torch.bool)

    def actions(compute, seed):
        agent = using(compute, planner=planner)
        return agent.act(obs, agent.initial_state(num_envs, seed), first, explore=False)[0]

    exact, rounded = actions(EAGER, seed=1), actions(BF16, seed=2)
    error = ((exact.var(0) + rounded.var(0)) / num_envs).sqrt()
    assert ((exact.mean(0) - rounded.mean(0)).abs() <= 4 * error).all()
    torch.testing.assert_close(exact.std(0), rounded.std(0), rtol=0.25, atol=0)


def test_losses_and_weights_stay_float32_when_products_do_not():
    agent, exact = using(BF16), using(EAGER)
    (metrics,), (expected,) = update(agent), update(exact)
    for name, value in metrics.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], rtol=0.05, atol=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in agent.model.parameters())
    assert all(
        value.dtype != torch.bfloat16 for state in agent.learner.optimizer.state.values() for value in state.values()
    )


def test_nothing_is_compiled_unless_asked_for():
    agent = make_agent()
    assert agent.compile([1], 16) is None
    assert agent.learner._world_loss == agent.learner.world_loss


def test_what_cannot_be_compiled_goes_on_without(monkeypatch):
    def refuse(self, *_):
        raise RuntimeError("no compiler\nat all")

    agent, expected = using(COMPILED), using(EAGER)
    monkeypatch.setattr("tdmpc.agent.planner.Planner.plan", refuse)
    assert agent.compile([2], 16) == "no compiler"
    monkeypatch.undo()
    assert agent.compute == EAGER
    state = expected.initial_state(2, seed=3)
    assert torch.equal(act(agent, agent.initial_state(2, seed=3))[0], act(expected, state)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of the compiler about itself
def test_compiled_it_computes_the_same():
    agent, eager = (using(compute, network={"episodic": True}) for compute in (COMPILED, EAGER))
    assert agent.compile([2], 16) is None
    for key, value in eager.model.state_dict().items():
        assert torch.equal(agent.model.state_dict()[key], value)
    assert torch.equal(agent.learner.scale.value, eager.learner.scale.value)
    assert all(parameter.grad is None for parameter in agent.model.parameters())

    states = [agent.initial_state(2, seed=3), eager.initial_state(2, seed=3)]
    for _ in range(3):
        (action, states[0]), (expected, states[1]) = act(agent, states[0]), act(eager, states[1])
        torch.testing.assert_close(action, expected, rtol=1e-3, atol=1e-3)
    for metrics, expected in zip(update(agent, 3), update(eager, 3), strict=True):
        for name, value in metrics.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-3)

    # Of two environments one has ended: the other is planned for as before, by what was compiled for two.
    state = agent.initial_state(2, seed=5)
    alone, left = act(agent, state.select(torch.tensor([1])), num_envs=1)
    assert alone.shape == (1, 2)
    assert left.mean.shape == (1, 3, 2)
    assert left.capacity == 2

    # Weights made compiled load uncompiled, and the other way round.
    eager.load_weights(agent.weights())
    agent.load_weights(eager.weights())
    assert not any("_orig_mod" in key for key in agent.weights()["model"])
