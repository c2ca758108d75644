"""The replay buffer against a toy that logs everything, and an oracle that counts valid starts by hand."""

import math
from collections import Counter, deque

import numpy as np
import pytest

from tdmpc.replay import EmptyReplayError, ReplayBuffer, bytes_needed

OBSERVATION_SIZE, ACTION_SIZE = 3, 2

Row = tuple[int, int, int]  # environment, episode, timestep: what a toy observation says


def make_buffer(num_envs=2, ring_size=12, horizon=3, seed=0, guest_rings=0):
    return ReplayBuffer(
        num_envs=num_envs,
        guest_rings=guest_rings,
        capacity=(num_envs + guest_rings) * ring_size,
        observation_size=OBSERVATION_SIZE,
        action_size=ACTION_SIZE,
        horizon=horizon,
        rng=np.random.default_rng(seed),
    )


class Toy:
    """Environments whose observations say where they are, played into a buffer and remembered by hand.

    The arrays handed to the buffer are spoiled after every call, and hold NaN outside the mask, so that
    whatever the buffer keeps of either shows up as a mismatch.
    """

    def __init__(self, buffer, num_envs=2, ring_size=12, lengths=range(1, 10), seed=0):
        self.buffer = buffer
        self.lengths = lengths
        self.rng = np.random.default_rng(seed)
        self.rings: list[deque[Row]] = [deque(maxlen=ring_size) for _ in range(num_envs)]
        self.log: dict[Row, tuple[list[float], float, bool]] = {}  # by the row that a transition leaves
        self.episode = np.full(num_envs, -1)
        self.t = np.zeros(num_envs, dtype=int)
        self.length = np.zeros(num_envs, dtype=int)

    def begin(self, mask):
        self.episode[mask] += 1
        self.t[mask] = 0
        self.length[mask] = self.rng.choice(self.lengths, size=mask.sum())
        obs = self.observe(mask)
        self.buffer.begin(obs, mask)
        obs[:] = np.nan

    def add(self, mask):
        action = np.full((len(mask), ACTION_SIZE), np.nan, dtype=np.float32)
        reward = np.full(len(mask), np.nan)
        terminated = np.zeros(len(mask), dtype=bool)
        for env in np.flatnonzero(mask):
            action[env] = self.rng.standard_normal(ACTION_SIZE)
            reward[env] = 1000 * self.episode[env] + self.t[env] + 0.5
            terminated[env] = self.t[env] + 1 == self.length[env] and self.episode[env] % 2 == 0
            left = (int(env), int(self.episode[env]), int(self.t[env]))
            self.log[left] = (action[env].tolist(), reward[env], terminated[env])
        self.t[mask] += 1
        obs = self.observe(mask)
        self.buffer.add(action, reward, obs, terminated, mask)
        for array in (obs, action, reward):
            array[:] = np.nan
        terminated[:] = True

    def discard(self, mask):
        self.buffer.discard(mask)
        for env in np.flatnonzero(mask):
            ring = self.rings[env]
            while ring and ring[-1][1] == self.episode[env]:
                ring.pop()
        self.length[mask] = self.t[mask]

    def observe(self, mask):
        obs = np.full((len(mask), OBSERVATION_SIZE), np.nan, dtype=np.float32)
        for env in np.flatnonzero(mask):
            row = (int(env), int(self.episode[env]), int(self.t[env]))
            obs[env] = row
            self.rings[env].append(row)
        return obs

    def play(self, rounds, pace=0.7, discards=0.0):
        """Move an environment with probability `pace` a round, and discard a share of running episodes."""
        for _ in range(rounds):
            moves = self.rng.random(len(self.t)) < pace
            over = self.t == self.length
            void = ~over & moves & (self.rng.random(len(self.t)) < discards)
            self.begin(moves & over)
            self.add(moves & ~over & ~void)
            self.discard(void)
        return self

    def valid_starts(self, horizon=3):
        return {
            ring[i]
            for ring in map(list, self.rings)
            for i in range(len(ring) - horizon)
            if all(row[:2] == ring[i][:2] for row in ring[i : i + horizon + 1])
        }


def make_toy(num_envs=2, ring_size=12, horizon=3, lengths=range(1, 10), seed=0):
    return Toy(make_buffer(num_envs, ring_size, horizon, seed), num_envs, ring_size, lengths, seed)


def only(env, num_envs=2):
    return np.arange(num_envs) == env


def starts_of(batch):
    return [tuple(map(int, obs)) for obs in batch["obs"][0].tolist()]


def assert_reaches_exactly_the_valid_starts(toy, horizon=3):
    expected = toy.valid_starts(horizon)
    if expected:
        # A start is missed with probability exp(-20).
        assert set(starts_of(toy.buffer.sample(20 * len(expected)))) == expected
        for _ in range(5):  # small batches are drawn by rejection
            assert set(starts_of(toy.buffer.sample(2))) <= expected
    else:
        with pytest.raises(EmptyReplayError):
            toy.buffer.sample(1)


def assert_uniform(toy, batch_size, draws=20_000):
    counts = Counter()
    for _ in range(math.ceil(draws / batch_size)):
        counts.update(starts_of(toy.buffer.sample(batch_size)))
    starts = toy.valid_starts()
    assert set(counts) == starts
    expected = counts.total() / len(starts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    degrees = len(starts) - 1
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_slices_are_what_the_toy_logged():
    toy = make_toy(num_envs=3, ring_size=200, lengths=range(1, 20)).play(400)
    batch = toy.buffer.sample(5000)
    obs, action, reward, terminated = (batch[k].numpy() for k in ("obs", "action", "reward", "terminated"))
    for b, (env, episode, t) in enumerate(starts_of(batch)):
        assert obs[:, b].tolist() == [[env, episode, t + i] for i in range(4)]
        for i in range(3):
            slice_row = (action[i, b].tolist(), reward[i, b, 0], terminated[i, b, 0])
            assert slice_row == toy.log[env, episode, t + i]


def test_content_is_the_log_where_nothing_was_overwritten():
    toy = make_toy(ring_size=150, horizon=1).play(150, pace=0.9)
    assert len(toy.buffer) == sum(map(len, toy.rings))
    assert set(starts_of(toy.buffer.sample(10_000))) == set(toy.log)


@pytest.mark.parametrize("seed", range(40))
def test_starts_are_the_oracles_for_random_play(seed):
    rng = np.random.default_rng(seed)
    horizon = int(rng.integers(1, 5))
    num_envs, ring_size = int(rng.integers(1, 5)), horizon + int(rng.integers(1, 15))
    toy = make_toy(num_envs, ring_size, horizon, range(1, int(rng.integers(2, 40))), seed)
    for _ in range(15):
        toy.play(rounds=5, discards=rng.choice([0, 0.1]))
        assert len(toy.buffer) == sum(map(len, toy.rings))
        assert_reaches_exactly_the_valid_starts(toy, horizon)


@pytest.mark.parametrize("ring_size", [4, 5, 9])
@pytest.mark.parametrize("length", [3, 4, 7, 100])
def test_ring_wraps_cleanly_at_every_offset(ring_size, length):
    toy = make_toy(num_envs=1, ring_size=ring_size, lengths=[length])
    for _ in range(4 * ring_size):
        toy.play(1, pace=1)
        assert_reaches_exactly_the_valid_starts(toy)


def test_every_start_is_equally_likely_whatever_the_fill_of_its_environment():
    toy = make_toy(num_envs=3, ring_size=60, lengths=range(3, 30))
    toy.play(100, pace=np.array([1, 0.4, 0.15]))
    fill = [len(ring) for ring in toy.rings]
    assert fill[0] == 60 > fill[1] > 30 > fill[2] > 5
    assert_uniform(toy, batch_size=10)


def test_enumerated_starts_are_equally_likely():
    toy = make_toy(num_envs=2, ring_size=60, lengths=range(1, 12)).play(60)
    assert_uniform(toy, batch_size=5000)


def test_rare_starts_are_equally_likely():
    toy = make_toy(num_envs=2, ring_size=500, lengths=[1, 2] * 20 + [6]).play(700)
    assert 0 < len(toy.valid_starts()) < len(toy.buffer) / 20
    assert_uniform(toy, batch_size=4, draws=4000)


def test_starts_are_equally_likely_where_candidates_often_run_short():
    toy = make_toy(num_envs=2, ring_size=100, lengths=range(1, 7)).play(200)
    assert_uniform(toy, batch_size=8)


def test_episodes_shorter_than_a_slice_are_refused_by_the_key_at_fault():
    toy = make_toy(lengths=[1, 2]).play(100)
    with pytest.raises(EmptyReplayError, match=r"^horizon=3 "):
        toy.buffer.sample(4)


def test_empty_buffer_is_refused():
    with pytest.raises(EmptyReplayError):
        make_buffer().sample(1)


def test_running_episode_is_sampled_up_to_its_newest_observation():
    toy = make_toy(num_envs=1, lengths=[100]).play(5, pace=1)
    assert starts_of(toy.buffer.sample(50)).count((0, 0, 1)) > 0
    assert toy.buffer.sample(50)["obs"][-1, :, 2].max() == 4


def test_termination_is_found_in_the_last_row_of_a_slice_alone():
    terminated = make_toy(ring_size=200, lengths=range(3, 8)).play(200).buffer.sample(2000)["terminated"]
    assert terminated[-1].sum() > 0
    assert terminated[:-1].sum() == 0


def test_discarded_episode_leaves_no_trace():
    plain, disturbed = make_toy(ring_size=50).play(30), make_toy(ring_size=50).play(30)
    everyone = np.ones(2, dtype=bool)
    disturbed.begin(everyone)
    for _ in range(4):
        disturbed.add(everyone)
    disturbed.discard(everyone)
    assert len(disturbed.buffer) == len(plain.buffer)
    assert (disturbed.buffer.sample(64) == plain.buffer.sample(64)).all()


def test_discard_of_one_environment_spares_the_others():
    toy = make_toy(lengths=[100]).play(8, pace=1)
    toy.discard(only(1))
    assert {env for env, _, _ in starts_of(toy.buffer.sample(100))} == {0}


def test_discard_does_not_bring_overwritten_rows_back():
    toy = make_toy(num_envs=1, ring_size=12, lengths=[9]).play(10, pace=1)  # ten rows of episode 0
    toy.play(6, pace=1)  # six of episode 1, four of them over the oldest
    toy.discard(only(0, 1))
    assert toy.valid_starts() == {(0, 0, 4), (0, 0, 5), (0, 0, 6)}
    assert_reaches_exactly_the_valid_starts(toy)


def test_discard_of_an_episode_that_filled_the_ring_empties_it_for_the_next():
    toy = make_toy(num_envs=1, ring_size=12, lengths=[100]).play(30, pace=1)
    toy.discard(only(0, 1))
    assert len(toy.buffer) == 0
    assert_reaches_exactly_the_valid_starts(toy)
    toy.play(5, pace=1)
    assert toy.valid_starts() == {(0, 1, 0), (0, 1, 1)}
    assert_reaches_exactly_the_valid_starts(toy)


def test_second_begin_gives_up_an_episode_without_steps():
    toy = make_toy(num_envs=1, lengths=[5])
    toy.begin(only(0, 1))
    toy.begin(only(0, 1))
    toy.play(5, pace=1)
    assert_reaches_exactly_the_valid_starts(toy)


def test_same_seed_gives_the_same_batches():
    first, second = make_toy(ring_size=80).play(80), make_toy(ring_size=80).play(80)
    for batch_size in (16, 16, 500):
        assert (first.buffer.sample(batch_size) == second.buffer.sample(batch_size)).all()


def test_batch_is_time_first_and_float32():
    batch = make_toy().play(50).buffer.sample(7)
    shapes = {"obs": (4, 7, 3), "action": (3, 7, 2), "reward": (3, 7, 1), "terminated": (3, 7, 1)}
    assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    assert {str(value.dtype) for value in batch.values()} == {"torch.float32"}


def test_all_environments_move_without_a_mask():
    buffer = make_buffer(horizon=1)
    buffer.begin(np.zeros((2, 3), dtype=np.float32), np.ones(2, dtype=bool))
    action, reward, obs = np.zeros((2, 2), np.float32), np.zeros(2), np.ones((2, 3), np.float32)
    buffer.add(action, reward, obs, np.zeros(2, dtype=bool))
    assert len(buffer) == 4


@pytest.mark.parametrize("situation", ["before begin", "after termination", "after its end", "after discard"])
def test_episode_that_does_not_run_can_neither_grow_nor_be_discarded(situation):
    toy = make_toy(lengths=[4])
    toy.begin(only(0))
    if situation != "before begin":
        toy.begin(only(1))
    if situation == "after termination":
        for _ in range(4):
            toy.add(only(1))
    if situation == "after its end":
        toy.buffer.end(only(1))
    if situation == "after discard":
        toy.discard(only(1))
    rows = len(toy.buffer)
    for misuse in (toy.add, toy.discard):
        with pytest.raises(RuntimeError, match=r"environments \[1\]: call begin"):
            misuse(np.ones(2, dtype=bool))
    assert len(toy.buffer) == rows


def test_capacity_is_shared_out_in_whole_rows():
    buffer = ReplayBuffer(
        num_envs=2, capacity=11, observation_size=3, action_size=2, horizon=3, rng=np.random.default_rng(0)
    )
    toy = Toy(buffer, ring_size=5).play(40)
    assert len(buffer) == 10
    assert_reaches_exactly_the_valid_starts(toy)


def test_ring_shorter_than_a_slice_is_refused():
    with pytest.raises(ValueError, match=r"^buffer_size=6 .* at least 8$"):
        make_buffer(ring_size=3)


def test_memory_is_known_beforehand():
    size = {"num_envs": 4, "capacity": 1003, "observation_size": 24, "action_size": 6}
    buffer = ReplayBuffer(**size, horizon=3, rng=np.random.default_rng(0))
    assert buffer.nbytes == bytes_needed(**size)
    assert bytes_needed(**size | {"capacity": 1_000_000}) < 130e6
    hosting = ReplayBuffer(**size, guest_rings=8, horizon=3, rng=np.random.default_rng(0))
    assert hosting.nbytes == bytes_needed(**size, guest_rings=8) <= buffer.nbytes
