import io
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tdmpc.merging.exchange import Costs, ExchangeError, Filesystem
from tdmpc.merging.merger import Abandoned, Control, Merger, NoMerge, Rounds
from tdmpc.merging.messages import Totals, UnusableMessage, read_statuses
from tdmpc.merging.strategies import Elastic, Mean, Nesterov, Weighted
from tests.merging.builders import filesystem


class Meeting:
    """An exchange of worker 1 in which peers have published `states`; what is in `failing` raises."""

    def __init__(self, states=None, returns=None):
        self.states, self.returns = dict(states or {}), dict(returns or {})
        self.calls, self.failing, self.own, self.over = [], {}, None, 0

    def join(self, resuming, overwrite):
        self._call("join")

    def reached(self, round):
        return max(round, self.over)

    def publish(self, header, state):
        self._call("publish")
        self.own = header
        self.states[header.worker] = {name: tensor.clone() for name, tensor in state.items()}

    def headers(self, round):
        self._call("headers")
        assert self.own.round == round
        return [
            self.own if worker == self.own.worker else replace(self.own, worker=worker, recent_return=value)
            for worker, value in sorted({w: self.returns.get(w) for w in self.states}.items())
        ]

    def read(self, header):
        if self.states[header.worker] is None:
            raise UnusableMessage("is damaged")
        return self.states[header.worker]

    def report(self, totals):
        self._call("report")

    def finish(self, totals):
        self._call("finish")

    def take_costs(self):
        return Costs(read_bytes=8, wait_s=0.5, skipped=1)

    def close(self):
        self._call("close")

    def _call(self, name):
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]


def weights(value):
    return {"model.w": torch.full((2,), float(value)), "scale": torch.tensor(float(value))}


def merger(exchange, live=None, strategy=None, rounds=None, said=None, *, collective=False, common=True):
    live = weights(0) if live is None else live
    return Merger(
        exchange,
        strategy or Mean(),
        lambda: live,
        rounds or Rounds(start=100, every=50, end=1000),
        worker=1,
        announce=(said if said is not None else []).append,
        section=lambda name: nullcontext(),
        common_start=common,
        collective=collective,
    )


def joined(exchange, live=None, step=0, **settings):
    made = merger(exchange, live, **settings)
    made.join(step, resuming=False, overwrite=False)
    return made


def never():
    return False


@pytest.mark.parametrize("num_envs", [1, 3, 4, 7, 50])
@pytest.mark.parametrize(("start", "every", "end"), [(0, 50, 1000), (100, 50, 1000), (37, 53, 419), (500, 60, 500)])
def test_workers_of_any_number_of_environments_have_the_same_rounds(num_envs, start, every, end):
    meeting = Meeting({2: weights(4)})
    one = joined(meeting, rounds=Rounds(start, every, end))
    numbers, step = [], 0
    while step < end:
        step += num_envs
        if one.due(step):
            numbers.append(one.merge(step, 0, never).metrics["merge/round"])
        assert not one.due(step)
    assert numbers == list(range(1, (end - start) // every + 1))


def test_a_round_moves_the_live_tensors_to_the_mean_of_all():
    live = weights(0)
    before = {name: id(tensor) for name, tensor in live.items()}
    merged = joined(Meeting({2: weights(3), 5: weights(6)}), live).merge(150, 70, never)
    assert merged.changed
    assert {name: tensor.tolist() for name, tensor in live.items()} == {"model.w": [3, 3], "scale": 3}
    assert {name: id(tensor) for name, tensor in live.items()} == before
    assert merged.metrics == {
        "merge/round": 1,
        "merge/peers": 2,
        "merge/skipped": 1,
        "merge/wait_s": 0.5,
        "merge/read_bytes": 8,
        "merge/distance": float("inf"),
        "merge/group_steps": 450,
        "merge/group_updates": 210,
    }


@pytest.mark.parametrize("peers", [{}, {2: None}])
@pytest.mark.parametrize("make", [Mean, Elastic, lambda: Nesterov(lambda name: True)])
def test_alone_nothing_changes(peers, make):
    live, strategy = weights(5), make()
    one = joined(Meeting(peers), live, strategy=strategy)
    memory = str(strategy.state_dict())
    live["model.w"].add_(1)
    merged = one.merge(150, 0, never)
    assert not merged.changed
    assert merged.metrics["merge/peers"] == 0
    assert "merge/distance" not in merged.metrics
    assert live["model.w"].tolist() == [6, 6]
    assert str(strategy.state_dict()) == memory
    assert not one.due(199)
    assert one.due(200)


def test_a_worker_that_has_lost_its_own_weights_takes_those_of_its_peers():
    live, meeting = weights(torch.nan), Meeting({2: weights(3)})
    publish = meeting.publish
    meeting.publish = lambda header, state: publish(header, state) or meeting.states.update({1: None})
    assert joined(meeting, live).merge(150, 0, never).changed
    assert live["model.w"].tolist() == [3, 3]


def test_a_disk_that_fails_costs_a_warning_and_those_rounds():
    said, live, meeting = [], weights(0), Meeting({2: weights(4)})
    one = joined(meeting, live, said=said)
    meeting.failing["publish"] = ExchangeError("exchange: cannot be written to (No space left on device)")
    for step in (150, 200):
        merged = one.merge(step, 0, never)
        assert (merged.changed, merged.metrics) == (False, {})
        assert not one.due(step)
    assert said == [
        "warning: merging: training goes on without (exchange: cannot be written to (No space left on device))"
    ]
    meeting.failing.clear()
    assert one.merge(250, 0, never).changed
    meeting.failing["report"] = meeting.failing["finish"] = ExchangeError("full")
    for _ in range(2):
        one.report(steps=250)
        one.finish(steps=250)
    assert len(said) == 3


def test_a_round_that_a_stop_breaks_off_is_still_due_and_has_changed_nothing():
    live, strategy = weights(0), Nesterov(lambda name: name == "model.w")
    meeting = Meeting({2: weights(4)})
    one = joined(meeting, live, strategy=strategy)
    before = str(one.state_dict())
    meeting.failing["headers"] = Abandoned()
    assert one.merge(150, 0, never) is None
    assert one.due(150)
    assert str(one.state_dict()) == before
    assert live["model.w"].tolist() == [0, 0]
    meeting.failing.clear()
    assert one.merge(150, 0, never).changed


def test_a_collective_exchange_that_has_lost_a_worker_ends_the_run_unless_that_was_to_stop():
    meeting = Meeting({2: weights(4)})
    one = joined(meeting, collective=True)
    meeting.failing["headers"] = ExchangeError("merging: a worker has ended")
    with pytest.raises(ExchangeError, match="a worker has ended"):
        one.merge(150, 0, never)
    assert one.due(150)
    assert one.merge(150, 0, lambda: True) is None
    meeting.failing = {"publish": ExchangeError("gone")}
    with pytest.raises(ExchangeError, match="gone"):
        one.merge(150, 0, never)


def test_a_collective_exchange_is_not_joined_when_no_round_is_left():
    meeting = Meeting()
    joined(meeting, step=1000, collective=True)
    assert meeting.calls == []
    joined(meeting, step=999, collective=True)
    assert meeting.calls == ["join"]


def test_rounds_that_are_over_for_the_others_are_left_out():
    said, meeting = [], Meeting({2: weights(4)})
    meeting.over = 3
    one = joined(meeting, said=said)
    assert not one.due(299)
    assert one.due(300)
    assert said == ["merging: the others are past round 1; merging again from 4 on"]


def test_a_run_that_did_not_merge_before_begins_with_the_next_round():
    one = merger(Meeting({2: weights(4)}))
    one.load_state_dict({})
    one.join(220, resuming=True, overwrite=False)
    assert not one.due(249)
    assert one.merge(250, 0, never).metrics["merge/round"] == 3


@pytest.mark.parametrize("make", [Mean, Weighted, Elastic, lambda: Nesterov(lambda name: name == "model.w", 0.7, 0.9)])
def test_a_continued_worker_goes_on_as_one_that_never_stopped(make):
    lives = [weights(0), weights(0)]
    mergers = [joined(Meeting({2: weights(4)}, {2: 7.0}), live, strategy=make()) for live in lives]
    for one in mergers:
        one.observe([1.0, 2.0])
        one.merge(150, 10, never)
    buffer = io.BytesIO()
    torch.save(mergers[1].state_dict(), buffer)
    buffer.seek(0)
    mergers[1] = merger(Meeting({2: weights(4)}, {2: 7.0}), lives[1], strategy=make())
    mergers[1].load_state_dict(torch.load(buffer, weights_only=True))
    mergers[1].join(150, resuming=True, overwrite=False)
    outcomes = []
    for one, live in zip(mergers, lives, strict=True):
        assert not one.due(150)
        live["model.w"].add_(1)
        one.observe([3.0])
        outcomes.append((one.merge(200, 20, never).metrics, one.exchange.own.recent_return, str(live)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == 2
    assert str(mergers[0].state_dict()) == str(mergers[1].state_dict())


def test_peers_are_told_the_mean_return_of_the_last_ten_episodes():
    meeting = Meeting()
    one = joined(meeting)
    one.merge(150, 0, never)
    assert meeting.own.recent_return is None
    one.observe(float(value) for value in range(20))
    one.merge(200, 0, never)
    assert meeting.own.recent_return == 14.5


def test_without_a_common_start_the_first_mean_is_the_common_point():
    ends = []
    for own, other in ((0, 8), (8, 0)):
        live = weights(own)
        one = joined(Meeting({2: weights(other)}), live, strategy=Nesterov(lambda name: True, 0.5, 0.9), common=False)
        one.merge(150, 0, never)
        assert live["model.w"].tolist() == [4, 4]
        one.exchange.states[2] = weights(6)
        live["model.w"].fill_(6)
        one.merge(200, 0, never)
        ends.append(live["model.w"].tolist())
    assert ends[0] == ends[1] == [pytest.approx(4 + 0.5 * 1.9 * 2)] * 2


def test_a_control_is_seen_and_never_merges(tmp_path):
    said = []
    control = Control(filesystem(tmp_path, 0, members=(1, 2)), said.append)
    control.join(0, resuming=False, overwrite=False)
    assert not control.due(10**9)
    control.report(steps=10, updates=4, merges=0, last_return=None, elapsed_s=1.0)
    assert read_statuses(tmp_path)[0].totals == Totals(steps=10, updates=4, elapsed_s=1.0)
    control.finish(steps=20, updates=9, merges=0, last_return=3.5, elapsed_s=2.0)
    control.close()
    assert read_statuses(tmp_path)[0].finished
    assert control.state_dict() == {}
    assert not list(tmp_path.glob("*.safetensors"))
    assert said == []


def test_a_run_alone_has_nothing_to_merge():
    alone = NoMerge()
    alone.join(5, resuming=True, overwrite=True)
    alone.observe([1.0])
    alone.report(steps=1)
    alone.finish(steps=1)
    alone.close()
    alone.load_state_dict({})
    assert alone.state_dict() == {}
    assert not alone.due(10**9)
    assert not alone.collective


def test_two_mergers_meet_through_a_folder(tmp_path):
    lives = [weights(1), weights(3)]
    exchanges = [filesystem(tmp_path, worker, members=(0, 1), sync=False) for worker in (0, 1)]
    mergers = []
    for worker, (exchange, live) in enumerate(zip(exchanges, lives, strict=True)):
        assert isinstance(exchange, Filesystem)
        one = merger(exchange, live)
        one.worker = worker
        one.join(0, resuming=False, overwrite=False)
        mergers.append(one)
    assert not mergers[0].merge(150, 9, never).changed
    merged = mergers[1].merge(150, 9, never)
    assert (merged.changed, merged.metrics["merge/peers"], merged.metrics["merge/group_steps"]) == (True, 1, 300)
    assert lives[1]["model.w"].tolist() == [2, 2]
    assert merged.metrics["merge/distance"] == pytest.approx(1 / 3)
    for one in mergers:
        one.close()
