"""Whole runs that share their experience: toys whose observations say where they come from."""

import itertools
import json
import shutil
import threading
from contextlib import ExitStack

import pytest

from tdmpc.keys import ConfigError
from tdmpc.replay_segments import Spans
from tests.training.builders import logged_truth, toy_trainer
from tests.training.test_merging import merging, peer, rows_of, run_of, same, weights_of  # noqa: F401
from tests.training.test_resume import assert_same, state_of, train

SHARE = {"share": "experience"}
BOTH = {"share": "both"}
GROUP = {"strategy": "mean", "workers": 3, "every": 50, "sync": True, "timeout": 60.0}
"""Worker 0 is the control; the others wait for each other."""
QUICK = {"num_envs": 3, "steps": 240, "steps_per_update": 8, "iterations": 1, "log_freq": 30, "eval_episodes": 1}


def run_side_by_side(root, workers=(1, 2), merge=None, of_worker=None, **keys):
    """Train workers to their end at the same time; return their trainers and what they have logged."""
    with ExitStack() as stack:
        made = {}
        for worker in workers:
            settings = GROUP | {"worker": worker} | (merge or {})
            own = {**QUICK, **keys, **(of_worker or {}).get(worker, {})}
            made[worker] = stack.enter_context(toy_trainer(root / f"worker-{worker}", merge=settings, **own))
        for trainer, _ in made.values():
            trainer.merger.join(0, resuming=False, overwrite=False)
        threads = [threading.Thread(target=trainer.train) for trainer, _ in made.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        for trainer, _ in made.values():
            trainer.merger.close()
    return made


def rings_of(replay):
    """Return the rows held of every ring in their order: `(id, episode, t, action, reward, terminated)`."""
    spans = Spans(*replay.held())
    rings = [[] for _ in spans.first]
    envs, positions = spans.rows()
    columns = replay.read(envs, positions)
    rows = zip(*(columns[name].tolist() for name in ("obs", "action", "reward", "terminated")), strict=True)
    for env, (obs, *transition) in zip(envs, rows, strict=True):
        rings[env].append((*map(int, obs), *transition))
    return rings


def episodes_of(rings):
    """Return the rows of every episode by its id and number."""
    episodes = {}
    for ring in rings:
        for row in ring:
            episodes.setdefault(row[:2], []).append(row)
    return episodes


def truth_of(run):
    """Return how many steps every episode of a run has taken, of those that have ended."""
    return {(line["id"], line["episode"]): line["t"] for line in logged_truth(run) if over(line)}


def over(line):
    return line.get("terminated", False) or line.get("truncated", False)


@pytest.mark.parametrize("share", ["experience", "both"])
def test_workers_end_with_each_others_episodes_and_only_whole_ones(tmp_path, share):
    made = run_side_by_side(tmp_path, merge={"share": share})
    rings = {worker: rings_of(trainer.replay) for worker, (trainer, _) in made.items()}
    for worker, other in ((1, 2), (2, 1)):
        own = episodes_of(rings[other][:3])
        guests = episodes_of(rings[worker][3:])
        ended = truth_of(tmp_path / f"worker-{other}")
        assert set(guests) <= set(own) & set(ended)
        # All but those that ended after the last round, at step 192 of 240.
        assert len(guests) > 0.6 * len(own)
        for name, rows in guests.items():
            assert rows == own[name]
            assert [row[2] for row in rows] == list(range(ended[name] + 1))
        assert not set(guests) & set(episodes_of(rings[worker][:3]))
    assert all(trainer.progress.total.steps == 240 for trainer, _ in made.values())
    assert all(trainer.progress.total.merges == (4 if share == "both" else 0) for trainer, _ in made.values())


def test_own_counts_and_returns_are_of_own_episodes_alone(tmp_path):
    (trainer, sink), _ = run_side_by_side(tmp_path, merge=SHARE).values()
    rings = rings_of(trainer.replay)
    assert (trainer.progress.total.steps, trainer.progress.total.updates) == (240, 40 // 8 + (240 - 42) // 8)
    assert trainer.agent.lifetime.steps == 240
    own, guests = episodes_of(rings[:3]), episodes_of(rings[3:])
    assert trainer.progress.total.episodes == len(set(own) & set(truth_of(tmp_path / "worker-1")))
    rows = sink.of("train")
    assert sum(row.get("merge/episodes_read", 0) for row in rows) == len(guests) > 5
    steps = sum(len(episode) - 1 for episode in own.values())
    assert steps == 240
    # Batches are drawn from the episodes of all.
    ids = {int(value) for value in trainer.replay.sample(2000)["obs"][0, :, 0]}
    assert ids == {name[0] for name in own | guests}


def test_rings_that_overflow_hold_episodes_one_after_the_other_and_slices_stay_within_one(tmp_path):
    made = run_side_by_side(tmp_path, merge=SHARE | {"every": 30}, buffer_size=6 * 14, steps=400)
    for trainer, _ in made.values():
        assert len(trainer.replay) == 6 * 14
        for ring in rings_of(trainer.replay):
            for before, after in itertools.pairwise(ring):
                assert after[2] in (0, before[2] + 1)
                assert after[2] == 0 or after[:2] == before[:2]
    obs = made[1][0].replay.sample(500)["obs"]
    assert (obs[1:, :, :2] == obs[:-1, :, :2]).all()
    assert (obs[1:, :, 2] == obs[:-1, :, 2] + 1).all()


def test_the_peer_has_a_smaller_replay_and_other_numbers_of_environments(tmp_path):
    of_worker = {1: {"num_envs": 1, "buffer_size": 5000}, 2: {"num_envs": 2, "buffer_size": 40}}
    made = run_side_by_side(tmp_path, merge=SHARE, of_worker=of_worker, env={"min_length": 15, "max_length": 25})
    large, small = (rings_of(trainer.replay) for trainer, _ in made.values())
    # Of the small one's rings of 10 rows no episode is held whole, so that none is given; of others it keeps the ends.
    assert len(large[1]) == 0
    ended = truth_of(tmp_path / "worker-1")
    for ring in small[2:]:
        assert len(ring) == 10
        assert ring[-1][2] == ended[ring[-1][:2]]
        assert [row[2] for row in ring] == list(range(ring[-1][2] - 9, ring[-1][2] + 1))


def test_the_control_neither_gives_nor_takes(monkeypatch, tmp_path, peer):  # noqa: F811
    peer(tmp_path, **BOTH)
    control = merging(monkeypatch, tmp_path, 0, merge=BOTH)
    plain = train(monkeypatch, tmp_path / "plain", eval_freq=10**6, eval_episodes=1, iterations=1)
    assert same(weights_of(control), weights_of(plain))
    assert len(control.trainer.replay.held()[0]) == 3
    assert control.trainer.merger.state_dict() == {}
    exchange = run_of(tmp_path, 0).parent / "exchange"
    assert list(exchange.glob("worker-2.episodes-*"))
    assert not list(exchange.glob("worker-0.*-*"))
    merging(monkeypatch, tmp_path, 1, merge=BOTH)
    assert not any("worker 0" in text for text in rows_of(tmp_path, 1))


@pytest.mark.parametrize("share", ["experience", "both"])
def test_weights_go_their_own_way_with_experience_and_are_merged_with_both(monkeypatch, tmp_path, peer, share):  # noqa: F811
    peer(tmp_path, share=share)
    outcome = merging(monkeypatch, tmp_path, 1, merge={"share": share})
    rows = [row for row in rows_of(tmp_path, 1) if "merge/round" in row]
    assert [row["merge/round"] for row in rows] == [1, 2, 3, 4]
    assert [row["merge/peers"] for row in rows] == [1] * 4
    assert rows[0]["merge/episodes_read"] > 10
    assert [row["merge/episodes_read"] for row in rows[1:]] == [0, 0, 0]
    assert sum(row["merge/skipped"] for row in rows) == 0
    assert [("merge/distance" in row) for row in rows] == [share == "both"] * 4
    merges = 4 if share == "both" else 0
    assert outcome.trainer.progress.total.merges == outcome.trainer.agent.lifetime.merges == merges


def test_one_that_takes_nothing_has_the_bits_of_one_that_trains_alone_with_as_much_room(monkeypatch, tmp_path):
    sharing = merging(monkeypatch, tmp_path / "a", 1, merge=SHARE)
    alone = merging(monkeypatch, tmp_path / "b", 1, buffer_size=5000)
    assert same(weights_of(sharing), weights_of(alone))


@pytest.mark.parametrize(("share", "stops"), [("experience", [123]), ("both", [90, 201])])
def test_a_worker_that_was_stopped_continues_with_the_same_bits(monkeypatch, tmp_path, peer, share, stops):  # noqa: F811
    merge = {"share": share}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for root in (unbroken, broken):
        peer(root, **merge)
    one = merging(monkeypatch, unbroken, 1, merge=merge)
    for stop_at in stops:
        assert "the same command continues" in merging(monkeypatch, broken, 1, stop_at=stop_at, merge=merge).text
    other = merging(monkeypatch, broken, 1, merge=merge)
    assert "continuing" in other.text
    assert_same(state_of(one.trainer), state_of(other.trainer))


def test_one_that_was_killed_takes_no_episode_twice(monkeypatch, tmp_path, peer):  # noqa: F811
    for name in ("unbroken", "killed"):
        peer(tmp_path / name, **SHARE)
    one = merging(monkeypatch, tmp_path / "unbroken", 1, merge=SHARE)
    merging(monkeypatch, tmp_path / "killed", 1, stop_at=120, merge=SHARE)
    before = tmp_path / "before"
    shutil.copytree(run_of(tmp_path / "killed", 1), before)
    merging(monkeypatch, tmp_path / "killed", 1, stop_at=200, merge=SHARE)
    shutil.rmtree(run_of(tmp_path / "killed", 1))
    shutil.copytree(before, run_of(tmp_path / "killed", 1))
    other = merging(monkeypatch, tmp_path / "killed", 1, merge=SHARE)
    assert "from step 120" in other.text
    assert_same(state_of(one.trainer), state_of(other.trainer))
    # To the third worker it looks as if that one had never been killed.
    messages = [sorted((run_of(tmp_path / name, 1).parent / "exchange").glob("worker-1.episodes-*")) for name in
                ("unbroken", "killed")]  # fmt: skip
    assert [path.name for path in messages[0]] == [path.name for path in messages[1]]


def test_messages_that_are_of_no_use_spoil_nothing(monkeypatch, tmp_path, peer):  # noqa: F811
    peer(tmp_path, **SHARE)
    exchange = run_of(tmp_path, 1).parent / "exchange"
    paths = sorted(exchange.glob("worker-2.episodes-*"))
    assert len(paths) == 4
    paths[0].write_bytes(paths[0].read_bytes()[:-9])
    paths[1].write_bytes(b"nonsense")
    outcome = merging(monkeypatch, tmp_path, 1, merge=SHARE)
    assert outcome.code == 0
    rows = [row for row in rows_of(tmp_path, 1) if "merge/round" in row]
    assert [row["merge/skipped"] for row in rows] == [2, 0, 0, 0]
    assert rows[0]["merge/episodes_read"] > 0
    assert "merging without the episodes of worker 2: its message cannot be read" in outcome.text
    assert "merging with the episodes of worker 2 again" in outcome.text


def test_a_group_that_shares_something_else_is_refused(monkeypatch, tmp_path):
    merging(monkeypatch, tmp_path, 1, stop_at=60)
    with pytest.raises(ConfigError, match=r"^merge\.share=both.*was started with weights.*cannot change"):
        merging(monkeypatch, tmp_path, 1, merge=BOTH)


def test_a_group_from_before_there_was_sharing_is_the_same_group(monkeypatch, tmp_path):
    merging(monkeypatch, tmp_path, 1)
    settings = json.loads((run_of(tmp_path, 1).parent / "exchange/group.json").read_text())["settings"]
    assert "merge.share" not in settings


def test_by_default_no_episode_leaves_a_worker(monkeypatch, tmp_path, peer):  # noqa: F811
    peer(tmp_path)
    outcome = merging(monkeypatch, tmp_path, 1)
    assert not list(tmp_path.rglob("*.episodes-*"))
    assert not any("merge/episodes_read" in row for row in rows_of(tmp_path, 1))
    assert len(outcome.trainer.replay.held()[0]) == 3
