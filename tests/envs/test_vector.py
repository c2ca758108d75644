import json

import numpy as np
import pytest

from envs import make_vector
from tests.toys import MAX_EPISODE_STEPS, reward_of

TOY = "gym:tests.toys:Toy-v0"
SUITE = "pendulum-swingup"


@pytest.fixture(params=["sync", "async"])
def mode(request):
    return request.param


def start(vector, first_seed=0):
    return vector.reset(np.ones(vector.num_envs, bool), range(first_seed, first_seed + vector.num_envs))


def roll(vector, steps):
    """Step, resetting what has ended, and return everything that came back."""
    rng = np.random.default_rng(0)
    history = [start(vector)]
    for t in range(steps):
        result = vector.step(rng.uniform(-1, 1, (vector.num_envs, vector.action_size)).astype(np.float32))
        history.extend(result)
        over = result.terminated | result.truncated
        if over.any():
            history.append(vector.reset(over, [1000 * t + number for number in range(vector.num_envs)]))
    return history


def test_sizes_are_known(mode):
    with make_vector(TOY, 2, mode, {"action_size": 3}) as vector:
        assert (vector.num_envs, vector.observation_size, vector.action_size) == (2, 3, 3)
        assert (vector.max_episode_steps, vector.mode) == (MAX_EPISODE_STEPS, mode)


@pytest.mark.parametrize(("task", "steps"), [(TOY, 60), (SUITE, 30), ("gym:Pendulum-v1", 250)])
def test_both_modes_give_the_same_bit_for_bit(task, steps):
    with make_vector(task, 3, "sync") as sync, make_vector(task, 3, "async") as parallel:
        for one, other in zip(roll(sync, steps), roll(parallel, steps), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_results_are_the_truth_that_the_environments_log(mode, tmp_path):
    with make_vector(TOY, 2, mode, {"log_dir": str(tmp_path)}) as vector:
        start(vector)
        seen = [[], []]
        for t in range(40):
            action = np.full((2, 2), (t % 16 - 8) / 8, np.float32)
            result = vector.step(action)
            for number in range(2):
                seen[number].append([column[number].tolist() for column in result[:4]])
            over = result.terminated | result.truncated
            if over.any():
                vector.reset(over, [t, t])
    for number in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["t"] > 0]
        truth = [
            [[line["id"], line["episode"], line["t"]], line["reward"], line["terminated"], line["truncated"]]
            for line in steps
        ]
        assert seen[number] == truth
        rewards = [
            reward_of(np.array(obs), np.array(line["action"])) for (obs, *_), line in zip(truth, steps, strict=True)
        ]
        assert rewards == [line["reward"] for line in steps]


def test_reset_touches_only_the_masked_environments(mode):
    with make_vector(TOY, 3, mode) as vector:
        start(vector)
        before = vector.step(np.zeros((3, 2), np.float32)).obs
        after = vector.reset(np.array([False, True, False]), [9, 9, 9])
        np.testing.assert_array_equal(before, [[0, 0, 1], [1, 0, 1], [2, 0, 1]])
        np.testing.assert_array_equal(after, [[0, 0, 1], [1, 1, 0], [2, 0, 1]])
        obs = vector.step(np.zeros((3, 2), np.float32)).obs
        np.testing.assert_array_equal(obs, [[0, 0, 2], [1, 1, 1], [2, 0, 2]])


def test_what_was_returned_is_never_overwritten(mode):
    with make_vector(TOY, 2, mode) as vector:
        returned = [start(vector), *vector.step(np.zeros((2, 2), np.float32))]
        copies = [array.copy() for array in returned]
        vector.step(np.ones((2, 2), np.float32))
        vector.reset(np.ones(2, bool), [5, 6])
        for array, copy in zip(returned, copies, strict=True):
            np.testing.assert_array_equal(array, copy)


def test_the_action_may_be_reused_at_once(mode):
    with make_vector(TOY, 1, mode) as vector:
        start(vector)
        action = np.ones((1, 2), np.float32)
        vector.step_async(action)
        action[:] = 0
        assert vector.step_wait().reward == [reward_of(np.array([0, 0, 1]), np.array([4, 4]))]


def test_an_inactive_environment_stays_as_it_is(mode):
    with make_vector(TOY, 2, mode) as vector:
        start(vector)
        only_first = np.array([True, False])
        result = vector.step(np.ones((2, 2), np.float32), only_first)
        np.testing.assert_array_equal(result.obs, [[0, 0, 1], [1, 0, 0]])
        assert result.reward[1] == 0
        assert not any(flags[1] for flags in result[2:])


def test_an_ended_environment_may_idle_but_not_be_stepped(mode):
    with make_vector(TOY, 2, mode) as vector:
        start(vector)
        active = np.ones(2, bool)
        while active.all():
            result = vector.step(np.zeros((2, 2), np.float32), active)
            active = ~(result.terminated | result.truncated)
        with pytest.raises(ValueError, match=r"environments \[\d\] have no running episode"):
            vector.step(np.zeros((2, 2), np.float32))
        while active.any():
            last = result.obs
            result = vector.step(np.zeros((2, 2), np.float32), active)
            np.testing.assert_array_equal(result.obs[~active], last[~active])
            active &= ~(result.terminated | result.truncated)


@pytest.mark.parametrize("trouble", ["nan_obs", "nan_reward", "physics"])
def test_a_failure_ends_one_episode_and_no_other(mode, trouble):
    options = {"trouble": trouble, "trouble_id": 1, "min_length": 5}
    with make_vector(TOY, 2, mode, options) as vector:
        start(vector)
        vector.step(np.zeros((2, 2), np.float32))
        result = vector.step(np.zeros((2, 2), np.float32))
        np.testing.assert_array_equal(result.obs, [[0, 0, 2], [1, 0, 1]])
        assert result.reward[1] == 0
        for flags, expected in zip(result[2:], ([0, 0], [0, 1], [0, 1]), strict=True):
            np.testing.assert_array_equal(flags, expected)
        np.testing.assert_array_equal(vector.reset(result.failed, [7, 7])[1], [1, 1, 0])


def test_wrong_use_is_refused(mode):
    with make_vector(TOY, 2, mode) as vector:
        with pytest.raises(ValueError, match="no running episode"):
            vector.step(np.zeros((2, 2), np.float32))
        with pytest.raises(ValueError, match="first reset"):
            vector.reset(np.array([True, False]), [0, 0])
        start(vector)
        with pytest.raises(ValueError, match=r"environments \[1\] got an action that is not finite"):
            vector.step(np.array([[0, 0], [0, np.nan]], np.float32))
        with pytest.raises(RuntimeError, match="no step"):
            vector.step_wait()
        vector.step_async(np.zeros((2, 2), np.float32))
        with pytest.raises(RuntimeError, match="not waited for"):
            vector.reset(np.ones(2, bool), [0, 0])


def test_close_twice_then_nothing_goes(mode):
    vector = make_vector(TOY, 2, mode)
    vector.close()
    vector.close()
    with pytest.raises(RuntimeError, match="closed"):
        start(vector)


def test_close_in_the_middle_of_a_step(mode):
    vector = make_vector(TOY, 2, mode)
    start(vector)
    vector.step_async(np.zeros((2, 2), np.float32))
    vector.close()
