import numpy as np
import pytest
from dm_control.rl.control import PhysicsError

from envs.dmcontrol import make_suite_task
from envs.tasks import make_env
from envs.wrappers import RESET_ATTEMPTS, FailureGuard
from tests.toys import Toy

TOY = "gym:tests.toys:Toy-v0"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("nan_obs", "the observation is not finite"),
        ("nan_reward", "the reward is nan"),
        ("physics", "PhysicsError: toy divergence"),
    ],
)
def test_a_failure_truncates_the_episode_with_the_last_valid_observation(trouble, reason):
    env = make_env(TOY, {"trouble": trouble, "trouble_at": 3})
    env.reset(seed=4)
    for _ in range(2):
        obs = env.step(np.zeros(2, np.float32))[0]
    failed_obs, *rest = env.step(np.zeros(2, np.float32))
    np.testing.assert_array_equal(failed_obs, obs)
    assert rest == [0.0, False, True, {"failed": True, "reason": reason}]


def test_a_diverging_simulation_is_a_failure_and_the_next_episode_is_sound():
    env = FailureGuard(make_suite_task("walker", "walk"))
    env.reset(seed=0)
    env.unwrapped._env.physics.data.qvel[:] = 1e20
    assert env.step(np.zeros(6, np.float32))[4]["failed"]
    obs, _ = env.reset(seed=1)
    np.testing.assert_array_equal(obs, make_env("walker-walk").reset(seed=1)[0])


def test_other_exceptions_propagate():
    env = make_env(TOY, {"trouble": "raise"})
    env.reset(seed=0)
    env.step(np.zeros(2, np.float32))
    with pytest.raises(KeyError, match="toy trouble"):
        env.step(np.zeros(2, np.float32))


class FragileStart(Toy):
    """Fail at the first resets."""

    def __init__(self, failures):
        super().__init__()
        self.seeds = []
        self.failures = failures

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        if len(self.seeds) <= self.failures:
            raise PhysicsError("bad start")
        return super().reset(seed=seed)


def test_a_failing_start_state_is_replaced_reproducibly():
    first, second = FragileStart(failures=2), FragileStart(failures=2)
    for env in (first, second):
        FailureGuard(env).reset(seed=7)
    assert first.seeds == second.seeds
    assert len(set(first.seeds)) == 3
    assert first.seeds[0] == 7


def test_a_reset_that_always_fails_raises():
    with pytest.raises(RuntimeError, match=r"seed 7.*bad start"):
        FailureGuard(FragileStart(failures=RESET_ATTEMPTS)).reset(seed=7)
