import pytest
import torch

from tdmpc.agent.compute import Compute
from tdmpc.agent.planner import Planner, PlannerNoise, PlannerState, Rollout, shift
from tests.agent.builders import imagine, make_agent


def first(*values):
    return torch.tensor(values, dtype=torch.bool)


def randomise(agent, seed=0):
    """Draw all weights anew: reward and Q start at 0, which would hide most mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.model.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return agent


def test_warm_start_is_the_last_plan_one_step_on_and_zero_where_an_episode_begins():
    mean = torch.arange(18.0).view(3, 3, 2) + 1
    shifted = shift(mean, first(True, False, True), 1)
    assert not shifted[0].any()
    assert not shifted[2].any()
    assert torch.equal(shifted[1, :2], mean[1, 1:])
    assert not shifted[1, 2].any()


def test_reset_mask_cuts_the_warm_start_of_just_the_masked_environments():
    agent = randomise(make_agent(planner={"num_pi_trajs": 0}))
    obs = torch.randn(3, 3)

    def act(mean, mask):
        state = PlannerState(mean, mean[:, :0], torch.Generator().manual_seed(5), capacity=3)
        return agent.act(obs, state, mask, explore=False)[0]

    warm = torch.rand(3, 3, 2)
    partly, cold, hot = (
        act(warm, first(True, False, True)),
        act(torch.zeros_like(warm), first(False, False, False)),
        act(warm, first(False, False, False)),
    )
    assert torch.equal(partly[[0, 2]], cold[[0, 2]])
    assert torch.equal(partly[1], hot[1])
    assert not torch.equal(partly[0], hot[0])


def test_the_number_of_environments_is_a_property_of_the_call():
    agent = randomise(make_agent())
    four, one = agent.initial_state(4, seed=1), agent.initial_state(1, seed=2)
    action, four = agent.act(torch.randn(4, 3), four, torch.ones(4, dtype=torch.bool), explore=True)
    assert action.shape == (4, 2)
    alone, one = agent.act(torch.randn(1, 3), one, torch.ones(1, dtype=torch.bool), explore=False)
    assert alone.shape == (1, 2)
    action, four = agent.act(torch.randn(4, 3), four, torch.zeros(4, dtype=torch.bool), explore=True)
    assert four.mean.shape == (4, 3, 2)
    assert action.abs().max() <= 1


def test_evaluation_does_not_touch_the_random_stream_of_training():
    agent, obs, begin = randomise(make_agent()), torch.randn(2, 3), torch.ones(2, dtype=torch.bool)
    undisturbed, _ = agent.act(obs, agent.initial_state(2, seed=1), begin, explore=True)
    state = agent.initial_state(2, seed=1)
    agent.act(obs, agent.initial_state(2, seed=9), begin, explore=False)
    disturbed, _ = agent.act(obs, state, begin, explore=True)
    assert torch.equal(undisturbed, disturbed)


@pytest.mark.parametrize("episodic", [False, True])
def test_imagination_is_the_world_model_with_less_arithmetic(episodic):
    agent = randomise(make_agent(network={"episodic": episodic}), seed=4)
    model, discount = agent.model, agent.discount
    if episodic:
        # Shift the logit so that some of the trajectories terminate, at different times.
        z = model.next(model.encode(torch.randn(200, 3)), torch.rand(200, 2) * 2 - 1)
        model.termination[-1].bias.data -= model.termination_logits(z).quantile(0.7)
    obs, actions = torch.randn(2, 3), torch.rand(2, 40, 3, 2) * 2 - 1
    z0 = model.encode(obs)
    imagination = imagine(agent)
    noise, heads = torch.randn(2, 40, 2), torch.tensor([2, 0])
    value = imagination.value(imagination.roll_actions(imagination.share(z0), actions), 3, heads, noise)

    z, expected, alive = z0.unsqueeze(1).expand(2, 40, -1), 0, torch.ones(2, 40, 1)
    for t in range(3):
        expected = expected + discount**t * alive * model.two_hot.decode(model.reward_logits(z, actions[:, :, t]))
        z = model.next(z, actions[:, :, t])
        if episodic:
            alive = alive * (model.termination_logits(z).sigmoid() <= 0.5)
    q = model.q_values(model.q.layers(), z, model.policy_action(z, noise))
    expected = expected + discount**3 * alive * (q[2] + q[0]) / 2
    torch.testing.assert_close(value, expected.squeeze(-1), rtol=1e-4, atol=1e-4)
    if episodic:
        assert 0 < alive.mean() < 1


def test_policy_trajectories_are_valued_as_any_other():
    agent = randomise(make_agent())
    imagination, z0 = imagine(agent), agent.model.encode(torch.randn(2, 3))
    shared = imagination.share(z0)
    actions, end = imagination.roll_policy(z0, shared, torch.randn(3, 2, 5, 2))
    again = imagination.roll_actions(shared, actions)
    torch.testing.assert_close(end.z, again.z)
    torch.testing.assert_close(end.value, again.value)


def test_a_value_that_is_not_a_number_counts_as_nothing():
    agent = randomise(make_agent())
    end = Rollout(torch.rand(1, 2, 16), torch.tensor([[[torch.nan], [1.0]]]), torch.ones(1, 2, 1))
    value = imagine(agent).value(end, 3, torch.tensor([0, 1]), torch.zeros(1, 2, 2))
    assert value[0, 0] == 0
    assert value[0, 1] != 0


def test_planning_finds_the_action_that_the_model_rewards():
    """The reward of this model grows with the first action and falls with the second."""
    agent = make_agent(planner={"iterations": 6, "num_samples": 128, "num_elites": 16, "num_pi_trajs": 0})

    class Known(Planner):
        def values(self, search, sampled, terminal, heads):
            return (sampled[..., 0] - 2 * sampled[..., 1]).sum(-1)

    noise = PlannerNoise.draw(agent.planner, 2, 2, 3, explore=False, generator=torch.Generator().manual_seed(0))
    planner = Known(agent.model, agent.planner, 0.99, Compute())
    action, mean = planner.plan(torch.zeros(2, 3), torch.zeros(2, 3, 2), noise)
    action = action[:, 0]
    assert (action[:, 0] > 0.9).all()
    assert (action[:, 1] < -0.9).all()
    assert mean.shape == (2, 3, 2)


def test_exploring_adds_noise_of_the_last_standard_deviation():
    agent, obs, begin = randomise(make_agent()), torch.randn(2, 3), torch.ones(2, dtype=torch.bool)
    calm, _ = agent.act(obs, agent.initial_state(2, seed=3), begin, explore=False)
    exploring, _ = agent.act(obs, agent.initial_state(2, seed=3), begin, explore=True)
    assert not torch.equal(calm, exploring)


def test_without_mpc_the_policy_prior_acts_by_its_mean_or_a_sample():
    agent = randomise(make_agent(planner={"mpc": False}))
    obs, begin = torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    mean, _ = agent.act(obs, agent.initial_state(4, seed=1), begin, explore=False)
    torch.testing.assert_close(mean, agent.model.policy_distribution(agent.model.encode(obs))[0].tanh())
    sample, _ = agent.act(obs, agent.initial_state(4, seed=1), begin, explore=True)
    assert not torch.equal(mean, sample)


def test_several_actions_of_one_plan_are_taken_one_after_another():
    agent = randomise(make_agent(planner={"plan_every": 2, "num_pi_trajs": 0}))
    obs, goes_on = torch.randn(2, 3), first(False, False)
    state = agent.initial_state(2, seed=1)
    planned, state = agent.act(obs, state, first(True, True), explore=False)
    solution = state.mean
    second, state = agent.act(torch.randn(2, 3), state, goes_on, explore=False)  # looks at no observation
    assert torch.equal(state.mean, solution)
    assert not torch.equal(planned, second)
    third, state = agent.act(obs, state, goes_on, explore=False)
    assert not torch.equal(state.mean, solution)

    # The second plan started where the first had come to, two steps on.
    again = agent.initial_state(2, seed=1)
    _, again = agent.act(obs, again, first(True, True), explore=False)
    again.queue = again.queue[:, 1:]
    expected, _ = agent.act(obs, again, goes_on, explore=False)
    assert torch.equal(third, expected)


def test_an_episode_that_begins_ends_the_plan_that_was_made_before_it():
    agent = randomise(make_agent(planner={"plan_every": 3}))
    obs, state = torch.randn(2, 3), agent.initial_state(2, seed=1)
    _, state = agent.act(obs, state, first(True, True), explore=True)
    assert state.queue.shape == (2, 2, 2)
    _, state = agent.act(obs, state, first(False, True), explore=True)
    assert state.queue.shape == (2, 2, 2)
    _, state = agent.act(obs, state, first(False, False), explore=True)
    assert state.queue.shape == (2, 1, 2)
    assert state.select(torch.tensor([1])).queue.shape == (1, 1, 2)
