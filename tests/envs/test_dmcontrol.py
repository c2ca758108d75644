import numpy as np
import pytest
from dm_control import suite

from envs.dmcontrol import make_suite_task
from envs.tasks import SUITE_TASKS


def episode(env, seed, actions):
    obs, _ = env.reset(seed=seed)
    history = [(obs, None, None, None)]
    for action in actions:
        history.append(env.step(action)[:4])
        if any(history[-1][2:]):
            break
    return history


def assert_same(one, other):
    assert len(one) == len(other)
    for (obs, *rest), (other_obs, *other_rest) in zip(one, other, strict=True):
        np.testing.assert_array_equal(obs, other_obs)
        assert rest == other_rest


def random_actions(env, steps, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, *env.action_space.shape)).astype(np.float32)


def assert_reproducible(domain, task, steps):
    env, fresh = make_suite_task(domain, task), make_suite_task(domain, task)
    actions = random_actions(env, steps)
    episode(env, 1, random_actions(env, steps, seed=1))
    assert_same(episode(env, 2**63 + 5, actions), episode(fresh, 2**63 + 5, actions))


@pytest.mark.parametrize(
    "task", ["walker-walk", "cup-catch", "reacher-hard", "lqr-lqr-6-2", "manipulator-insert-peg", "finger-turn-hard"]
)
def test_an_episode_depends_on_its_seed_and_actions_only(task):
    assert_reproducible(*SUITE_TASKS[task], steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(SUITE_TASKS.keys() - {"quadruped-escape"}))
def test_an_episode_of_any_task_depends_on_its_seed_and_actions_only(task):
    assert_reproducible(*SUITE_TASKS[task], steps=100)


def test_different_seeds_start_differently():
    env = make_suite_task("walker", "walk")
    assert not np.array_equal(env.reset(seed=1)[0], env.reset(seed=2)[0])


def test_a_step_is_two_steps_of_the_suite_with_summed_rewards():
    env, raw = make_suite_task("cheetah", "run"), suite.load("cheetah", "run")
    raw.task.random.seed(np.random.SeedSequence(3).generate_state(8))
    raw.reset()
    env.reset(seed=3)
    for action in random_actions(env, 20):
        steps = [raw.step(action.astype(np.float64)) for _ in range(2)]
        obs, reward, *_ = env.step(action)
        assert reward == steps[0].reward + steps[1].reward
        flat = np.concatenate([np.ravel(part) for part in steps[1].observation.values()])
        np.testing.assert_array_equal(obs, flat.astype(np.float32))


def test_actions_are_scaled_to_the_bounds_of_the_suite(monkeypatch):
    env = make_suite_task("quadruped", "walk")
    spec = env._env.action_spec()
    taken = []
    step = env._env.step
    monkeypatch.setattr(env._env, "step", lambda action: taken.append(action) or step(action))
    env.reset(seed=0)
    for value in (-1, 1):
        env.step(np.full(12, value, np.float32))
    np.testing.assert_array_equal(taken[0], spec.minimum)
    np.testing.assert_array_equal(taken[2], spec.maximum)


def test_actions_without_bounds_are_passed_on_as_they_are(monkeypatch):
    env = make_suite_task("lqr", "lqr_2_1")
    env.reset(seed=0)
    env.step(np.array([0.25], np.float32))
    assert env._env.physics.control() == [0.25]


@pytest.mark.parametrize(("domain", "task"), [("pendulum", "swingup"), ("lqr", "lqr_2_1")])
def test_an_episode_is_truncated_after_500_steps(domain, task):
    env = make_suite_task(domain, task)
    history = episode(env, 0, random_actions(env, 600))
    assert len(history) == 501
    assert history[-1][2:] == (False, True)


def test_the_end_with_discount_zero_is_termination_and_stops_the_repeat(monkeypatch):
    env = make_suite_task("lqr", "lqr_2_1")
    env.reset(seed=0)
    monkeypatch.setattr(env._env.task, "get_termination", lambda physics: 0.0)
    monkeypatch.setattr(env._env.task, "get_reward", lambda physics: 1.0)
    _, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert (reward, terminated, truncated) == (1.0, True, False)
