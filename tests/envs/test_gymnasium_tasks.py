import numpy as np
import pytest
from gymnasium.spaces import Box

from envs.gymnasium_tasks import FlatBox, make_gymnasium_task
from tests.toys import Toy

TOY = "tests.toys:Toy-v0"


def test_actions_are_scaled_to_the_bounds_of_the_environment(monkeypatch):
    taken = []
    step = Toy.step
    monkeypatch.setattr(Toy, "step", lambda self, action: taken.append(action) or step(self, action))
    env = make_gymnasium_task(TOY, {})
    env.reset(seed=0)
    env.step(np.array([-1, 1], np.float32))
    env.step(np.array([0, 0.5], np.float32))
    np.testing.assert_array_equal(taken, np.array([[-2, 4], [1, 2.5]], np.float32))
    assert taken[0].dtype == np.float32


def test_awkward_bounds_are_never_overstepped():
    rng = np.random.default_rng(0)
    toy = Toy()
    toy.action_space = Box(*np.sort(rng.normal(size=(2, 1000)) * 10, axis=0), dtype=np.float64)
    env = FlatBox(toy)
    for value in (-1.0, 1.0, np.nextafter(np.float32(1), np.float32(0))):
        assert toy.action_space.contains(env._unscaled(np.full(1000, value, np.float32)))


def test_observations_are_the_callers_own_though_the_environment_reuses_its_array():
    env = make_gymnasium_task(TOY, {})
    observations = [env.reset(seed=5)[0]]
    observations += [env.step(np.zeros(2, np.float32))[0] for _ in range(2)]
    np.testing.assert_array_equal(observations, [[5, 0, 0], [5, 0, 1], [5, 0, 2]])


def test_shapes_are_flattened():
    toy = Toy()
    toy.observation_space = Box(-1, 1, (3, 1), np.float64)
    toy.action_space = Box(-1, 1, (2, 2), np.float64)
    env = FlatBox(toy)
    assert (env.observation_space.shape, env.action_space.shape) == ((3,), (4,))
    assert env.reset(seed=0)[0].dtype == np.float32
    assert env.step(np.zeros(4, np.float32))[0].shape == (3,)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "HalfCheetah-v5"])
def test_an_episode_depends_on_its_seed_and_actions_only(env_id):
    env, fresh = make_gymnasium_task(env_id, {}), make_gymnasium_task(env_id, {})
    actions = np.random.default_rng(0).uniform(-1, 1, (20, *env.action_space.shape)).astype(np.float32)
    env.reset(seed=0)
    env.step(actions[0])
    histories = [[e.reset(seed=2**64 + 1)[0], *(e.step(action)[0] for action in actions)] for e in (env, fresh)]
    np.testing.assert_array_equal(*histories)
