"""Whole runs that merge, in this process: the other worker has run before, and its last message is what they find."""

import json
import shutil

import pytest
import torch

from tdmpc import runs
from tdmpc.config import TrainConfig, run_directory
from tdmpc.keys import ConfigError
from tdmpc.merging.exchange import ExchangeError, Filesystem
from tdmpc.merging.merger import NoMerge
from tdmpc.merging.messages import read_statuses
from tdmpc.seeding import Seeds, Stream
from tdmpc.training.trainer import Stopped
from tests.merging.builders import filesystem
from tests.training.builders import toy_trainer
from tests.training.test_resume import assert_same, state_of, train

MERGE = {"strategy": "mean", "workers": 3, "every": 50, "max_age": 10**6}
QUICK = {"eval_freq": 10**6, "eval_episodes": 1, "iterations": 1, "log": {"tensorboard": False}}


def merging(monkeypatch, root, worker, *, stop_at=None, stop_when=None, merge=None, **keys):
    settings = MERGE | {"worker": worker} | (merge or {})
    return train(monkeypatch, root, stop_at=stop_at, stop_when=stop_when, merge=settings, **{**QUICK, **keys})


def run_of(root, worker):
    config = TrainConfig(task="gym:tests.toys:ToyRepeatable-v0", run_root=str(root), merge=MERGE | {"worker": worker})
    return run_directory(config)


def rows_of(root, worker):
    return [json.loads(line) for line in (run_of(root, worker) / "metrics.jsonl").read_text().splitlines()]


def weights_of(outcome):
    return outcome.trainer.agent.weights()["model"]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """Run worker 2 to its end, once for each kind of merging; return a function that copies what it left."""
    roots = {}

    def place(root, **merge):
        key = str(sorted(merge.items()))
        if key not in roots:
            roots[key] = tmp_path_factory.mktemp("peer")
            with pytest.MonkeyPatch.context() as monkeypatch:
                assert merging(monkeypatch, roots[key], 2, merge=merge).code == 0
        shutil.copytree(roots[key], root, dirs_exist_ok=True)

    return place


@pytest.mark.parametrize(("num_envs", "steps"), [(1, 240), (3, 240), (7, 300)])
def test_merges_are_counted_at_every_point_once(monkeypatch, tmp_path, peer, num_envs, steps):
    peer(tmp_path)
    outcome = merging(monkeypatch, tmp_path, 1, num_envs=num_envs, steps=steps)
    assert outcome.code == 0
    merges = (steps - 40) // 50
    assert outcome.trainer.progress.total.merges == merges
    assert outcome.trainer.agent.lifetime.merges == merges
    rows = [row for row in rows_of(tmp_path, 1) if "merge/round" in row]
    assert [row["merge/round"] for row in rows] == list(range(1, merges + 1))
    for row in rows:
        assert row["kind"] == "train"
        assert row["merge/peers"] == 1
        assert row["merge/skipped"] == 0
        assert 0 < row["merge/distance"] < 1
        assert row["merge/read_bytes"] > 0
        assert row["merge/group_steps"] >= row["step"]
        assert {f"time/merge/{part}/total_s" for part in ("publish", "wait", "read", "apply")} < row.keys()
    last = [row for row in rows_of(tmp_path, 1) if row["kind"] == "train"][-1]
    assert last["progress/merges"] == last["progress/lifetime_merges"] == merges
    assert f"{merges} merges" in outcome.text


def test_a_worker_without_peers_has_the_bits_of_one_that_does_not_merge(monkeypatch, tmp_path):
    alone = merging(monkeypatch, tmp_path / "a", 0, merge={"control": False})
    plain = train(monkeypatch, tmp_path / "b", **QUICK)
    assert same(weights_of(alone), weights_of(plain))
    assert alone.trainer.progress.total.merges == alone.trainer.agent.lifetime.merges == 0
    rows = [row for row in rows_of(tmp_path / "a", 0) if "merge/round" in row]
    assert [(row["merge/peers"], row["merge/skipped"]) for row in rows] == [(0, 2)] * 4
    assert not any("merge/distance" in row for row in rows)


def test_a_run_alone_has_no_trace_of_merging(monkeypatch, tmp_path):
    plain = train(monkeypatch, tmp_path, **QUICK)
    assert type(plain.trainer.merger) is NoMerge
    assert not list(tmp_path.rglob("exchange"))
    (path,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert not any(name.startswith(("merge/", "time/merge")) for row in rows for name in row)


def test_workers_begin_alike_and_share_no_other_stream(tmp_path):
    states, firsts = {}, {}
    for name, worker, shared in (("a", 1, True), ("b", 2, True), ("c", 1, False), ("d", 2, False)):
        merge = MERGE | {"worker": worker, "shared_init": shared}
        with toy_trainer(tmp_path / name / "worker", steps=60, merge=merge) as (trainer, _):
            states[name] = trainer.agent.weights()["model"]
            firsts[name] = trainer.collector._random_actions()
    assert same(states["a"], states["b"])
    assert not same(states["c"], states["d"])
    assert not same(states["a"], states["c"])
    assert (firsts["a"] != firsts["b"]).all()
    assert (firsts["a"] == firsts["c"]).all()


def test_another_seed_is_another_worker_in_no_stream():
    one, other = Seeds(1, worker=1), Seeds(2, worker=0)
    for stream in Stream:
        assert one.integer(stream) != other.integer(stream)
        assert one.integer(stream, 1) != other.integer(stream, 0)


# Between rounds; where one is due; and both.
@pytest.mark.parametrize(("strategy", "stops"), [("mean", [123]), ("mean", [141]), ("nesterov", [90, 201])])
def test_a_worker_that_was_stopped_continues_at_its_round(monkeypatch, tmp_path, peer, strategy, stops):
    merge = {"strategy": strategy}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for root in (unbroken, broken):
        peer(root, **merge)
    one = merging(monkeypatch, unbroken, 1, merge=merge)
    for stop_at in stops:
        stopped = merging(monkeypatch, broken, 1, stop_at=stop_at, merge=merge)
        assert "the same command continues" in stopped.text
        assert not read_statuses(run_of(broken, 1).parent / "exchange")[1].finished
    other = merging(monkeypatch, broken, 1, merge=merge)
    assert "continuing" in other.text
    assert_same(state_of(one.trainer), state_of(other.trainer))
    rounds = [
        [(row["step"], row["merge/round"], row["merge/distance"]) for row in rows_of(root, 1) if "merge/round" in row]
        for root in (unbroken, broken)
    ]
    assert rounds[0] == rounds[1]
    assert [number for _, number, _ in rounds[0]] == [1, 2, 3, 4]
    assert one.trainer.progress.total.merges == 4


def test_one_that_was_killed_goes_back_to_its_checkpoint_and_does_its_rounds_again(monkeypatch, tmp_path, peer):
    peer(tmp_path / "unbroken")
    peer(tmp_path / "killed")
    one = merging(monkeypatch, tmp_path / "unbroken", 1)
    merging(monkeypatch, tmp_path / "killed", 1, stop_at=120)
    before = tmp_path / "before"
    shutil.copytree(run_of(tmp_path / "killed", 1), before)
    merging(monkeypatch, tmp_path / "killed", 1, stop_at=200)
    shutil.rmtree(run_of(tmp_path / "killed", 1))
    shutil.copytree(before, run_of(tmp_path / "killed", 1))
    other = merging(monkeypatch, tmp_path / "killed", 1)
    assert "from step 120" in other.text
    assert_same(state_of(one.trainer), state_of(other.trainer))


def test_one_killed_before_its_first_checkpoint_starts_anew_in_the_same_group(monkeypatch, tmp_path, peer):
    peer(tmp_path)
    merging(monkeypatch, tmp_path, 1, stop_at=200)
    group = json.loads((run_of(tmp_path, 1).parent / "exchange/group.json").read_text())["id"]
    for name in ("checkpoints", "replay"):
        shutil.rmtree(run_of(tmp_path, 1) / name)
    (run_of(tmp_path, 1) / "summary.json").unlink()  # which a kill does not leave either
    anew = merging(monkeypatch, tmp_path, 1)
    assert anew.trainer.progress.total.merges == 4
    assert json.loads((run_of(tmp_path, 1).parent / "exchange/group.json").read_text())["id"] == group


def test_what_was_deleted_is_not_taken_for_the_same_experiment(monkeypatch, tmp_path, peer):
    peer(tmp_path)
    merging(monkeypatch, tmp_path, 1)
    shutil.rmtree(run_of(tmp_path, 1))
    with pytest.raises(ExchangeError, match="overwrite=true to replace it"):
        merging(monkeypatch, tmp_path, 1)
    assert not (run_of(tmp_path, 1) / "config.yaml").exists()
    assert merging(monkeypatch, tmp_path, 1, overwrite=True).code == 0


def test_a_group_of_other_settings_is_refused_before_anything_is_overwritten(monkeypatch, tmp_path, peer):
    peer(tmp_path)
    with pytest.raises(ExchangeError, match=r"other settings \(mlp_dim: 16 before, 24 now\)"):
        merging(monkeypatch, tmp_path, 1, mlp_dim=24)
    assert not (run_of(tmp_path, 1) / "config.yaml").exists()


@pytest.mark.parametrize(("name", "value"), [("every", 60), ("workers", 4), ("strategy", "elastic"), ("moments", True)])
def test_a_key_of_merging_that_cannot_change_is_refused_by_name(monkeypatch, tmp_path, name, value):
    merging(monkeypatch, tmp_path, 1, stop_at=60)
    with pytest.raises(ConfigError, match=rf"^merge\.{name}=.*was started with.*cannot change"):
        merging(monkeypatch, tmp_path, 1, merge={name: value})


def test_a_run_from_before_there_was_merging_continues(monkeypatch, tmp_path):
    unbroken = train(monkeypatch, tmp_path / "a", **QUICK)
    train(monkeypatch, tmp_path / "b", stop_at=123, **QUICK)
    real = runs.load_newest

    def load_old(checkpoints, use, warn):
        def use_old(step, content):
            del content["trainer.pt"]["merger"], content["trainer.pt"]["progress"]["counts"]["merges"]
            del content["weights.pt"]["lifetime"]["merges"], content["trainer.pt"]["progress"]["elapsed_s"]["merging"]
            use(step, content)

        return real(checkpoints, use_old, warn)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "load_newest", load_old)
        continued = train(monkeypatch, tmp_path / "b", **QUICK)
    assert_same(state_of(unbroken.trainer), state_of(continued.trainer))


@pytest.mark.parametrize("moments", [False, True])
def test_moments_are_merged_where_that_is_asked_for(monkeypatch, tmp_path, peer, moments):
    peer(tmp_path, moments=moments)
    taken = []
    real = Filesystem.publish

    def publish(self, header, state):
        taken.append({name.split(".")[0] for name in state})
        real(self, header, state)

    monkeypatch.setattr(Filesystem, "publish", publish)
    outcome = merging(monkeypatch, tmp_path, 1, merge={"moments": moments})
    assert outcome.trainer.progress.total.merges == 4
    assert taken == [{"model", "scale", *(["exp_avg", "exp_avg_sq"] if moments else [])}] * 4
    for optimizer in (outcome.trainer.agent.learner.optimizer, outcome.trainer.agent.learner.policy_optimizer):
        updates = {int(state["step"]) for state in optimizer.state.values()}
        assert updates == {outcome.trainer.progress.total.updates}


def test_the_control_trains_alone_and_leaves_nothing_but_its_status(monkeypatch, tmp_path, peer):
    peer(tmp_path)
    control = merging(monkeypatch, tmp_path, 0)
    plain = train(monkeypatch, tmp_path / "plain", **QUICK)
    assert same(weights_of(control), weights_of(plain))
    assert control.trainer.merger.state_dict() == {}
    exchange = run_of(tmp_path, 0).parent / "exchange"
    assert not list(exchange.glob("worker-0.round-*"))
    totals = read_statuses(exchange)[0].totals
    assert (totals.steps, totals.merges) == (240, 0)
    assert totals.last_return == pytest.approx(float(control.trainer.last_evaluation.returns.mean()))
    assert "control: worker 0 trains alone" in control.text


def test_who_ends_last_writes_down_what_became_of_all(monkeypatch, tmp_path, peer):
    peer(tmp_path)
    table = run_of(tmp_path, 0).parent / "group.txt"
    assert "did not start" in table.read_text()
    merging(monkeypatch, tmp_path, 0)
    last = merging(monkeypatch, tmp_path, 1)
    assert table.read_text() in last.text
    head, *lines = table.read_text().splitlines()
    assert head.split() == ["worker", "return", "steps", "updates", "merges", "time", "merge=mean"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert [line.split()[4] for line in lines] == ["0", "4", "0"]
    assert lines[0].endswith("control")
    content = json.loads((table.parent / "group.json").read_text())
    assert content["merge"]["strategy"] == "mean"
    assert [content["workers"][str(worker)]["totals"]["merges"] for worker in range(3)] == [0, 4, 0]


def test_a_stop_does_not_wait_for_the_others_and_leaves_the_round_for_later(monkeypatch, tmp_path, peer):
    """Worker 2 has joined and never comes to a round, so that worker 1 would wait for it until the timeout."""
    settings, polls = MERGE | {"worker": 1, "sync": True, "timeout": 3600.0}, []
    monkeypatch.setattr("tdmpc.group.time.sleep", polls.append)
    keys = {"task": "gym:tests.toys:Toy-v0", "num_envs": 3, "steps": 240, "merge": settings}
    with toy_trainer(tmp_path / "worker-1", should_stop=lambda: len(polls) > 3, **keys) as (trainer, sink):
        trainer.merger.join(0, resuming=False, overwrite=False)
        group = trainer.merger.exchange._settings
        fingerprint = {name: value for name, value in group.items() if name not in ("format", "every")}
        other = filesystem(tmp_path / "exchange", 2, members=(1, 2), every=50, fingerprint=fingerprint)
        other.join(resuming=False, overwrite=False)
        before = trainer.merger.state_dict()["round"]
        with pytest.raises(Stopped):
            trainer.train()
        other.close()
        trainer.merger.close()
        assert len(polls) == 4
        assert trainer.step == 90
        assert trainer.merger.due(90)
        assert trainer.merger.state_dict()["round"] == before == 0
        assert trainer.progress.total.merges == 0
        assert read_statuses(tmp_path / "exchange")[1].totals.steps == 90
    assert not any("merge/round" in row for row in sink.rows)
