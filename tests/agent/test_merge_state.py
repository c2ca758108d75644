import torch

from tdmpc.merging.strategies import copy_into
from tests.agent.builders import make_agent


def update(agent, seed=0):
    generator = torch.Generator().manual_seed(seed)
    horizon, batch = agent.planner.horizon, 8
    sizes = {"obs": (horizon + 1, agent.network.observation_size), "action": (horizon, agent.network.action_size)}
    slices = {name: torch.randn(rows, batch, size, generator=generator) for name, (rows, size) in sizes.items()}
    slices |= {name: torch.zeros(horizon, batch, 1) for name in ("reward", "terminated")}
    agent.update(slices)


def test_it_is_what_the_agent_goes_on_with():
    agent, other = make_agent(seed=0), make_agent(seed=7)
    for learner, seed in ((agent, 1), (other, 2)):
        update(learner, seed)
    live, theirs = agent.merge_state(moments=True), other.merge_state(moments=True)
    copy_into(live, {name: tensor.clone() for name, tensor in theirs.items()})
    ours, given = agent.weights(), other.weights()
    assert all(torch.equal(ours["model"][name], given["model"][name]) for name in given["model"])
    assert torch.equal(ours["scale"], given["scale"])
    for optimizer in ("optimizer", "policy_optimizer"):
        states = [getattr(learner.learner, optimizer).state.values() for learner in (agent, other)]
        for mine, its in zip(*states, strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in ("exp_avg", "exp_avg_sq"))


def test_it_holds_online_and_target_networks_and_the_scale():
    names = make_agent().merge_state(moments=False).keys()
    parts = {name.split(".")[1] for name in names if name.startswith("model.")}
    assert parts >= {"encoder", "dynamics", "reward", "policy", "q", "target_q"}
    assert {name for name in names if not name.startswith("model.")} == {"scale"}


def test_moments_are_those_of_every_trained_parameter():
    agent = make_agent()
    names = {name for name, parameter in agent.model.named_parameters() if parameter.requires_grad}
    expected = {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names}
    before = agent.merge_state(moments=True)
    assert before.keys() - agent.merge_state(moments=False).keys() == expected
    assert not any(before[name].any() for name in expected)
    update(agent)
    after = agent.merge_state(moments=True)
    assert after.keys() == before.keys()
    assert all(after[name].shape == before[name].shape for name in after)
    assert any(after[name].any() for name in expected)


def test_it_is_still_that_of_the_agent_after_a_checkpoint_was_loaded():
    agent = make_agent()
    update(agent)
    state = agent.state_dict()
    agent.load_state_dict(state)
    live = agent.merge_state(moments=True)
    copy_into(live, {name: torch.full_like(tensor, 0.25) for name, tensor in live.items()})
    assert all(bool((moments["exp_avg"] == 0.25).all()) for moments in agent.learner.optimizer.state.values())
    assert agent.learner.scale.value == 0.25
