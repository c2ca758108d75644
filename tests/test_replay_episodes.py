"""Episodes that go from one replay to another, against rings that are kept by hand."""

import copy
import io
import json
import re
from collections import deque

import numpy as np
import pytest
import torch

from tdmpc.merging.messages import Header, read_message, write_message
from tdmpc.replay_episodes import ReplayEpisodes
from tdmpc.replay_segments import ReplaySegments
from tests.test_replay import Toy, assert_reaches_exactly_the_valid_starts, make_buffer
from tests.test_replay_segments import as_json, assert_same

GUEST = 100  # added to the environments of guests, so that nobody's rows look like another's


def hosting(num_envs=2, ring_size=12, horizon=3, seed=0, guest_rings=2):
    return make_buffer(num_envs, ring_size, horizon, seed, guest_rings)


class Giver(Toy):
    """A toy that says which of its episodes it can give, and gives them under the number of a guest."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.episodes = ReplayEpisodes(self.buffer)
        self.gave: set[tuple[int, int]] = set()

    def play(self, *args, **kwargs):
        super().play(*args, **kwargs)
        self.buffer.end(self.t == self.length)
        return self

    def whole(self):
        """Return the episodes that are over and held from their first row on, environment by environment."""
        runs = {(env, int(self.episode[env])) for env in range(len(self.t)) if self.t[env] < self.length[env]}
        return [row[:2] for ring in self.rings for row in ring if row[2] == 0 and row[:2] not in runs]

    def give(self):
        episodes = self.episodes.finished()
        self.episodes.given()
        return as_guest(episodes)


def as_guest(episodes):
    return episodes | {"obs": episodes["obs"] + torch.tensor([GUEST, 0, 0])}


def make_giver(num_envs=2, ring_size=40, lengths=range(1, 10), seed=1):
    return Giver(make_buffer(num_envs, ring_size, horizon=1), num_envs, ring_size, lengths, seed)


def names_of(episodes):
    """Return environment and episode of every episode, after checking that its rows are whole and in order."""
    names, begin = [], 0
    for env, rows in zip(episodes["env"].tolist(), episodes["rows"].tolist(), strict=True):
        found = episodes["obs"][begin : begin + rows].long().tolist()
        assert found == [[GUEST + env, found[0][1], t] for t in range(rows)]
        names.append((env, found[0][1]))
        begin += rows
    assert begin == len(episodes["obs"])
    return names


@pytest.mark.parametrize("seed", range(30))
def test_guests_are_as_if_they_had_been_played_here_whatever_the_sizes(seed):
    rng = np.random.default_rng(seed)
    horizon, guest_rings = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    num_envs, ring_size = int(rng.integers(1, 4)), horizon + int(rng.integers(1, 15))
    toy = Toy(hosting(num_envs, ring_size, horizon, seed, guest_rings), num_envs, ring_size, range(1, 30), seed)
    guests = [deque(maxlen=ring_size) for _ in range(guest_rings)]
    toy.rings += guests
    giver = make_giver(int(rng.integers(1, 4)), int(rng.integers(3, 40)), range(1, int(rng.integers(2, 40))), seed)
    taker, written = ReplayEpisodes(toy.buffer), [0] * guest_rings
    for _ in range(15):
        toy.play(rounds=int(rng.integers(8)), discards=rng.choice([0, 0.1]))
        giver.play(rounds=int(rng.integers(25)), discards=rng.choice([0, 0.1]))
        expected = [name for name in giver.whole() if name not in giver.gave]
        episodes = giver.give()
        assert names_of(episodes) == expected
        assert len(episodes["obs"]) <= len(giver.buffer)
        assert taker.problem(episodes) is None
        assert taker.take(7, episodes) == len(expected)
        giver.gave |= set(expected)
        for (env, episode), rows in zip(expected, episodes["rows"].tolist(), strict=True):
            ring = written.index(min(written))
            guests[ring].extend((GUEST + env, episode, t) for t in range(rows))
            written[ring] += rows
        assert len(toy.buffer) == sum(map(len, toy.rings))
        assert_reaches_exactly_the_valid_starts(toy, horizon)


def test_actions_rewards_and_terminations_come_along():
    giver, taker = make_giver(ring_size=200).play(100), hosting(ring_size=200)
    assert ReplayEpisodes(taker).take(7, giver.give()) > 10
    batch = taker.sample(2000)
    obs, action, reward, terminated = (batch[name].numpy() for name in ("obs", "action", "reward", "terminated"))
    for b in range(2000):
        for i in range(3):
            env, episode, t = map(int, obs[i, b])
            row = (action[i, b].tolist(), reward[i, b, 0], terminated[i, b, 0])
            assert row == giver.log[env - GUEST, episode, t]


def test_an_episode_that_still_runs_is_given_when_it_is_over_and_one_that_failed_never():
    giver = make_giver(num_envs=1, lengths=[5])
    giver.play(4, pace=1)
    assert names_of(giver.give()) == []
    giver.discard(np.array([True]))
    giver.play(6, pace=1)
    assert names_of(giver.give()) == [(0, 1)]


def test_an_episode_longer_than_the_ring_it_was_played_in_is_not_given():
    giver = make_giver(num_envs=1, ring_size=12, lengths=[30, 5])
    names = [name for _ in range(200) for name in names_of(giver.play(1, pace=1).give())]
    assert len(names) > 2
    assert all((*name, 4) in giver.log and (*name, 5) not in giver.log for name in names)


def test_one_longer_than_the_ring_of_a_guest_leaves_its_end_there():
    giver, buffer = make_giver(num_envs=1, ring_size=40, lengths=[30]).play(31, pace=1), hosting(guest_rings=1)
    assert ReplayEpisodes(buffer).take(7, giver.give()) == 1
    assert {int(obs[2]) for obs in buffer.sample(500)["obs"][0]} == set(range(19, 28))


def test_what_was_given_is_given_once_and_what_was_not_is_not_lost():
    giver = make_giver().play(60)
    first = giver.episodes.finished()
    assert names_of(as_guest(first)) == names_of(as_guest(giver.episodes.finished())) != []
    giver.episodes.given()
    assert names_of(giver.give()) == []
    giver.play(40)
    later = names_of(giver.give())
    assert later
    assert not set(later) & set(names_of(as_guest(first)))


def test_an_episode_that_is_offered_again_is_not_taken_again():
    giver, taker = make_giver(ring_size=200), ReplayEpisodes(hosting(ring_size=200))
    giver.play(60)
    first = as_guest(giver.episodes.finished())
    giver.play(60)
    more = as_guest(giver.episodes.finished())
    new = len(set(names_of(more)) - set(names_of(first)))
    assert 0 < new < len(names_of(more))
    assert [taker.take(7, episodes) for episodes in (first, first, more, first, more)] == [
        len(names_of(first)), 0, new, 0, 0
    ]  # fmt: skip
    assert taker.take(8, first) == len(names_of(first))  # of another worker


def test_one_that_continues_from_a_checkpoint_takes_and_gives_nothing_twice(tmp_path):
    giver, other = make_giver(ring_size=60), make_giver(ring_size=60, seed=5)
    giver.buffer = buffer = hosting(ring_size=60)
    giver.episodes = ReplayEpisodes(buffer)
    giver.play(60)
    other.play(60)
    giver.give()
    giver.episodes.take(7, as_guest(other.episodes.finished()))
    stream = io.BytesIO()
    torch.save(giver.episodes.state_dict(), stream)
    stream.seek(0)
    index = as_json(ReplaySegments(tmp_path, buffer).save())
    restored = hosting(ring_size=60, seed=9)
    ReplaySegments(tmp_path, restored).restore(index)
    continued = ReplayEpisodes(restored)
    continued.load_state_dict(torch.load(stream, weights_only=True))
    assert_same(restored, buffer)
    other.play(60)
    offered = as_guest(other.episodes.finished())
    assert continued.take(7, offered) == giver.episodes.take(7, offered) > 0
    assert continued.state_dict() == giver.episodes.state_dict()
    assert_same(restored, buffer)
    assert len(continued.finished()["env"]) == len(giver.episodes.finished()["env"]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_guests_are_saved_and_restored_with_all_other_rows(tmp_path, seed):
    rng = np.random.default_rng(seed)
    toy, giver = Toy(hosting(ring_size=15), ring_size=15), make_giver(seed=seed)
    store, taker = ReplaySegments(tmp_path, toy.buffer, segment_bytes=400), ReplayEpisodes(toy.buffer)
    for _ in range(12):
        toy.play(int(rng.integers(10)), discards=0.1)
        giver.play(int(rng.integers(30)))
        taker.take(7, giver.give())
        index, past = json.loads(json.dumps(store.save().index)), copy.deepcopy(toy.buffer)
        store.prune([index])
        restored = hosting(ring_size=15, seed=99)
        ReplaySegments(tmp_path, restored).restore(index)
        assert_same(restored, past)


def test_a_replay_that_was_saved_with_other_guests_is_refused_by_both_numbers():
    with pytest.raises(
        ValueError, match=r"^num_envs=2 and 2 rings for episodes of others: the replay was saved with 2$"
    ):
        hosting().load_state_dict(hosting(guest_rings=0).state_dict())


def test_nothing_is_given_by_an_empty_replay_and_nothing_taken_of_it(tmp_path):
    write_message(tmp_path / "message", Header(2, 1, 50, 0, None), make_giver().give())
    _, episodes = read_message(tmp_path / "message")
    taker = ReplayEpisodes(hosting())
    assert taker.problem(episodes) is None
    assert taker.take(7, episodes) == 0


def longer(tensor):
    return torch.cat([tensor, tensor[-1:]])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda e: {"obs": e["obs"][:, :2]}, r"obs is float32 \[\*, 2\], not float32 \[\*, 3\]"),
        (lambda e: {"obs": e["obs"].double()}, r"obs is float64 \[\*, 3\], not float32"),
        (lambda e: {"reward": torch.tensor(1.0)}, r"reward is float32 \[\], not float32 \[\*\]"),
        (lambda e: {"reward": e["reward"][:, None]}, "reward is float32"),
        (lambda e: {"terminated": e["terminated"].float()}, "terminated is float32"),
        (lambda e: {"rows": e["rows"].float()}, "rows is float32"),
        (lambda e: {"cost": e["reward"]}, r"cost is float32 \[\*\], not missing"),
        (lambda e: {"action": None}, r"action is missing, not float32 \[\*, 2\]"),
        (lambda e: {"reward": longer(e["reward"])}, "do not add up"),
        (lambda e: {"env": longer(e["env"])}, "do not add up"),
        (lambda e: {"rows": e["rows"] + 1}, "do not add up"),
        (lambda e: {"rows": e["rows"] * torch.tensor([-1, *[1] * (len(e["rows"]) - 1)])}, "do not add up"),
        (lambda e: {"rows": torch.full_like(e["rows"], 2**62)}, "do not add up"),
        (lambda e: {"terminated": torch.ones_like(e["terminated"])}, "do not add up"),
        (lambda e: {name: torch.empty(0) for name in e}, "is float32"),
    ],
)  # fmt: skip
def test_what_would_not_fit_is_refused_before_it_is_taken(damage, reason):
    episodes = make_giver().play(60).give()
    damaged = {name: tensor for name, tensor in (episodes | damage(episodes)).items() if tensor is not None}
    taker = ReplayEpisodes(hosting())
    assert taker.problem(episodes) is None
    problem = taker.problem(damaged)
    assert problem is not None
    assert problem.startswith("has other episodes: ")
    assert re.search(reason, problem)
