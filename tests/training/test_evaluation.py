import numpy as np
import pytest
import torch

from envs import make_vector
from tdmpc.seeding import Seeds
from tdmpc.telemetry.timers import Timers
from tdmpc.training.evaluation import Evaluator
from tests.agent.builders import make_agent
from tests.training.builders import logged_truth


@pytest.fixture
def agent():
    return make_agent(network={"episodic": True})


def evaluator(agent, num_envs, seed=1, **env):
    return Evaluator(agent, make_vector("gym:tests.toys:Toy-v0", num_envs, "sync", env), Seeds(seed), Timers())


@pytest.mark.parametrize(("episodes", "num_envs"), [(7, 3), (5, 5), (1, 1), (4, 2)])
def test_exactly_the_episodes_asked_for_run_to_their_end(tmp_path, agent, episodes, num_envs):
    (tmp_path / "truth").mkdir()
    outcome = evaluator(agent, num_envs, log_dir=str(tmp_path / "truth")).evaluate(episodes, round=0)
    begun, ended, rewards, steps = {}, 0, {}, {}
    for entry in logged_truth(tmp_path):
        name = (entry["id"], entry["episode"])
        if "seed" in entry:
            begun[name] = entry["seed"]
        else:
            rewards[name] = rewards.get(name, 0) + entry["reward"]
            steps[name] = entry["t"]
            ended += entry["terminated"] or entry["truncated"]
    assert len(begun) == ended == episodes
    assert len(set(begun.values())) == episodes
    assert sorted(outcome.returns) == pytest.approx(sorted(rewards.values()), abs=1e-3)
    assert sorted(outcome.lengths) == sorted(steps.values())


def test_short_episodes_are_not_favoured(agent):
    """Taking the first episodes to end of a free-running vector would give mostly short ones."""
    outcome = evaluator(agent, 10, min_length=1, max_length=40).evaluate(200, round=0)
    assert outcome.lengths.mean() == pytest.approx(20.5, abs=2.5)


def test_a_round_repeats_itself_and_differs_from_the_next(agent):
    first = evaluator(agent, 3).evaluate(5, round=1)
    again = evaluator(agent, 3).evaluate(5, round=1)
    assert np.array_equal(first.returns, again.returns)
    assert not np.array_equal(first.returns, evaluator(agent, 3).evaluate(5, round=2).returns)


def test_evaluating_leaves_the_agent_as_it_is(agent):
    before = {key: value.clone() for key, value in agent.model.state_dict().items()}
    evaluator(agent, 3).evaluate(5, round=0)
    assert all(torch.equal(before[key], value) for key, value in agent.model.state_dict().items())
    assert agent.lifetime.steps == 0


def test_a_failed_episode_counts_with_what_it_had(agent):
    outcome = evaluator(agent, 2, trouble="nan_obs", trouble_at=2, min_length=5).evaluate(2, round=0)
    assert outcome.failed.tolist() == [True, True]
    assert list(outcome.lengths) == [2, 2]


def test_evaluating_does_not_explore_and_begins_every_episode_once(agent):
    calls, act = [], agent.act

    def spy(obs, state, first, explore):
        calls.append((obs[:, 2].tolist(), first.tolist(), explore))
        return act(obs, state, first, explore)

    agent.act = spy
    evaluator(agent, 3).evaluate(5, round=0)
    assert not any(explore for _, _, explore in calls)
    for times, first, _ in calls:
        assert first == [t == 0 for t in times]
    assert sum(len(times) for times, _, _ in calls if times[0] == 0) == 5


def test_pictures_are_those_of_the_first_episode(agent):
    pictures, watched = [], []
    runs = evaluator(agent, 2)
    outcome = runs.evaluate(5, 0, lambda: pictures.append(1), lambda: watched.append(1))
    assert len(pictures) == outcome.lengths[0] + 1
    assert len(watched) == sum(outcome.lengths[begin : begin + 2].max() for begin in (0, 2, 4))
