import contextlib
import errno
import multiprocessing
import os
import platform
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tdmpc.merging import exchange as module
from tdmpc.merging.exchange import Costs, ExchangeError, held, locked
from tdmpc.merging.messages import Totals, UnusableMessage, read_statuses
from tdmpc.merging.strategies import Elastic, Mean, Nesterov, Weighted
from tests.merging.builders import FINGERPRINT, FakeTime, filesystem, merge, publish

# A fresh process whose children have torch imported already.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.merging.test_exchange"])


@pytest.fixture
def fake():
    return FakeTime()


@pytest.fixture
def said():
    return []


@pytest.fixture
def group(tmp_path, fake, said):
    """Make workers that have joined; what worker 0 says is in `said`."""
    made = []

    def join(*workers, resuming=False, overwrite=False, **settings):
        settings.setdefault("members", workers)
        exchanges = [filesystem(tmp_path, n, fake, said=said if n == 0 else None, **settings) for n in workers]
        for exchange in exchanges:
            made.append(exchange)
            exchange.join(resuming, overwrite)
        return exchanges

    yield join
    for exchange in made:
        exchange.close()


def workers_of(headers):
    return [header.worker for header in headers]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def restarted(exchange, fake, said=None, resuming=True):
    exchange.close()
    other = filesystem(exchange.folder.path, exchange.worker, fake, said=said, members=(0, 1))
    other.join(resuming=resuming, overwrite=False)
    return other


# Merging


def test_three_workers_that_hold_one_two_and_six_end_at_three(group):
    exchanges = group(0, 1, 2)
    lives = [
        {
            "weight": torch.nn.Parameter(torch.tensor([[value]])),
            "target": torch.tensor([10 * value]),
            "half": torch.tensor(value, dtype=torch.bfloat16),
            "count": torch.tensor([int(value)]),
        }
        for value in (1.0, 2.0, 6.0)
    ]
    identities = [{name: id(tensor) for name, tensor in live.items()} for live in lives]
    for exchange, live in zip(exchanges, lives, strict=True):
        publish(exchange, 1, live)
    for exchange, live in zip(exchanges, lives, strict=True):
        assert merge(exchange, Mean(), live, 1) == [0, 1, 2]
    for live in lives:
        assert {name: tensor.item() for name, tensor in live.items()} == {
            "weight": 3,
            "target": 30,
            "half": 3,
            "count": 6,
        }
    assert [{name: id(tensor) for name, tensor in live.items()} for live in lives] == identities


@pytest.mark.parametrize(
    "make",
    [Mean, lambda: Nesterov(lambda name: name == "weight"), lambda: Weighted(0.5)],
    ids=["mean", "nesterov", "weighted"],
)
def test_workers_that_wait_for_each_other_have_the_same_bits_after_every_round(tmp_path, make):
    def run(worker):
        exchange = filesystem(tmp_path, worker, sync=True, timeout_s=20.0)
        exchange._clock, exchange._sleep = time.monotonic, time.sleep
        exchange.join(resuming=False, overwrite=False)
        generator = torch.Generator().manual_seed(worker)
        live = {"weight": torch.linspace(-1, 1, 1000), "target": torch.zeros(7, dtype=torch.bfloat16)}
        strategy = make()
        strategy.begin(live)
        for round in range(1, 5):
            for tensor in live.values():
                tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            assert merge(exchange, strategy, live, round, recent_return=float(worker * round)) == [0, 1, 2]
            history[worker].append([tensor.clone() for tensor in live.values()])
        exchange.finish(Totals())
        exchange.close()

    history = [[], [], []]
    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [len(rounds) for rounds in history] == [4, 4, 4]
    for first, *others in zip(*history, strict=True):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_elastic_workers_take_part_and_stay_different(group):
    zero, one = group(0, 1, sync=False)
    lives = [{"x": torch.tensor([0.0])}, {"x": torch.tensor([8.0])}]
    publish(one, 1, lives[1])
    merge(zero, Elastic(0.5), lives[0], 1)
    merge(one, Elastic(0.5), lives[1], 1)
    assert [live["x"].item() for live in lives] == [2, 6]


# Waiting for a round


def test_it_is_waited_for_exactly_this_round_of_every_member(group, fake):
    zero, one, two = group(0, 1, 2)
    publish(one, 3)
    publish(two, 4)
    fake.after(2, lambda: publish(two, 5))
    fake.after(4, lambda: publish(one, 4))
    fake.after(6, lambda: publish(one, 5))
    publish(zero, 5)
    assert [(header.worker, header.round) for header in zero.headers(5)] == [(0, 5), (1, 5), (2, 5)]
    costs = zero.take_costs()
    assert costs.wait_s == pytest.approx(6, abs=0.1)
    assert replace(costs, wait_s=0.0) == Costs()
    assert zero.take_costs() == Costs()


def test_a_peer_that_never_came_costs_one_timeout_and_is_named_once(group, fake, said):
    (zero,) = group(0, members=(0, 1))
    for round in (1, 2, 3):
        publish(zero, round)
        assert workers_of(zero.headers(round)) == [0]
    assert fake.now == pytest.approx(110)
    assert said == ["merging without worker 1: it didn't come within 10 s"]
    assert zero.take_costs().skipped == 3


def test_a_dead_peer_costs_nothing_where_its_lock_tells(group, fake, said):
    zero, one = group(0, 1)
    publish(one, 1)
    one.close()
    for round in (1, 2, 3):
        publish(zero, round)
        assert workers_of(zero.headers(round)) == ([0, 1] if round == 1 else [0])
    assert fake.now == 100
    assert said == ["merging without worker 1: it has stopped"]


def test_a_dead_peer_costs_one_timeout_where_its_lock_does_not_tell(group, fake, monkeypatch, said):
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "another machine")
        (one,) = group(1, members=(0, 1))
        publish(one, 1)
        one.close()
    (zero,) = group(0, members=(0, 1))
    for round in (1, 2, 3, 4):
        publish(zero, round)
        zero.headers(round)
    assert fake.now == pytest.approx(110)
    assert said == ["merging without worker 1: it didn't come within 10 s"]


def test_a_peer_that_dies_while_it_is_waited_for_is_not_waited_for_any_longer(group, fake, said):
    zero, one = group(0, 1)
    publish(zero, 1)
    fake.after(3, one.close)
    assert workers_of(zero.headers(1)) == [0]
    assert fake.now == pytest.approx(103, abs=0.1)
    assert said == ["merging without worker 1: it has stopped"]


def test_a_peer_that_ends_right_after_publishing_is_merged(group, monkeypatch):
    """It does both between the moments of looking for its message and of looking whether it lives."""
    zero, one = group(0, 1)
    publish(zero, 1)
    looks = []

    def then_it_ends(look):
        def wrapped(*arguments):
            answer = look(*arguments)
            looks.append(look)
            if len(looks) == 1:
                publish(one, 1)
                one.close()
            return answer

        return wrapped

    for name in ("_gone", "_messages_of"):
        monkeypatch.setattr(zero, name, then_it_ends(getattr(zero, name)))
    assert workers_of(zero.headers(1)) == [0, 1]


def test_a_peer_that_has_finished_is_not_waited_for(group, fake, said):
    zero, one = group(0, 1)
    publish(one, 1)
    one.finish(Totals(steps=100))
    for round in (1, 2, 3):
        publish(zero, round)
        assert workers_of(zero.headers(round)) == ([0, 1] if round == 1 else [0])
    assert fake.now == 100
    assert said == ["merging without worker 1: it has finished"]


def test_a_peer_much_slower_than_the_timeout_holds_nobody_up_twice(group, fake, said):
    zero, one = group(0, 1, timeout_s=2.0)
    for round in range(1, 11):
        fake.after(50 * round, lambda round=round: publish(one, round))
    for round in range(1, 11):
        fake.sleep(10)
        publish(zero, round)
        zero.headers(round)
    assert fake.now == pytest.approx(100 + 10 * 10 + 2)
    assert said == ["merging without worker 1: it didn't come within 2 s"]


def test_a_peer_that_was_late_once_is_waited_for_again_when_it_has_caught_up(group, fake, said):
    zero, one = group(0, 1)
    publish(zero, 1)
    zero.headers(1)
    publish(one, 1)  # at the time of the second round: as fast as the other, and behind it
    fake.after(5, lambda: publish(one, 2))
    merge(zero, Mean(), {"x": torch.tensor([1.0])}, 2)
    assert said == ["merging without worker 1: it didn't come within 10 s", "merging with worker 1 again"]
    assert fake.now == pytest.approx(115, abs=0.1)
    one.close()
    publish(zero, 3)
    zero.headers(3)
    assert said[2:] == ["merging without worker 1: it has stopped"]


def test_a_peer_past_this_round_is_merged_from_its_last_but_one_message(group, fake, said):
    zero, one = group(0, 1)
    for round in (1, 2):
        publish(one, round)
    publish(zero, 1)
    assert [header.round for header in zero.headers(1)] == [1, 1]
    publish(one, 3)
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0]
    assert fake.now == 100
    assert said == ["merging without worker 1: it is past this round"]


def test_without_waiting_the_newest_message_counts_unless_it_is_too_old(group, fake, said):
    zero, one = group(0, 1, sync=False, max_age=200)
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0]
    publish(one, 1, step=100)
    publish(one, 2, step=200)
    for round, expected in ((3, [3, 2]), (4, [4, 2]), (5, [5])):
        publish(zero, round)
        assert [header.round for header in zero.headers(round)] == expected
    assert fake.now == 100
    assert said == [
        "merging without worker 1: it has published nothing yet",
        "merging without worker 1: it is more than 200 steps behind",
    ]


def test_without_waiting_a_slower_peer_is_merged_while_its_message_is_young_enough(group, fake):
    zero, one = group(0, 1, sync=False, max_age=450)
    merged = []
    for round in range(1, 11):
        if round % 5 == 0:
            publish(one, round // 5)  # five times slower
        publish(zero, round)
        if workers_of(zero.headers(round)) == [0, 1]:
            merged.append(round)
    assert merged == [5]  # 400 steps behind, then 500 and more
    assert fake.now == 100


# Messages that cannot be used


def damaged(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_message_is_skipped_and_its_sender_merged_again_later(group, tmp_path, said):
    zero, one = group(0, 1)
    live = {"x": torch.tensor([4.0])}
    for round in (1, 2):
        publish(one, round, {"x": torch.tensor([8.0])})
        damaged(tmp_path / f"worker-1.round-{round}.safetensors")
        assert merge(zero, Mean(), live, round) == [0]
    assert said == ["merging without worker 1: its message is damaged: its checksum is wrong"]
    assert zero.take_costs() == Costs(read_bytes=8, wait_s=0, skipped=2)
    publish(one, 3, {"x": torch.tensor([8.0])})
    assert merge(zero, Mean(), live, 3) == [0, 1]
    assert live["x"].item() == 6
    publish(one, 4)
    assert merge(zero, Mean(), live, 4) == [0, 1]
    assert said[1:] == ["merging with worker 1 again"]


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:40]), "cannot be read"),
        (lambda path: path.write_bytes(b"nonsense" * 20), "cannot be read"),
    ],
    ids=["truncated", "nonsense"],
)
def test_a_message_without_a_header_is_skipped_at_once(group, tmp_path, fake, said, sync, spoil, reason):
    zero, one = group(0, 1, sync=sync)
    publish(one, 1)
    spoil(tmp_path / "worker-1.round-1.safetensors")
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0]
    assert fake.now == 100
    assert len(said) == 1
    assert reason in said[0]


def test_without_waiting_the_newest_message_that_can_be_read_counts(group, tmp_path, said):
    zero, one = group(0, 1, sync=False)
    publish(one, 1)
    publish(one, 2)
    (tmp_path / "worker-1.round-2.safetensors").write_bytes(b"nonsense")
    publish(zero, 2)
    assert [header.round for header in zero.headers(2)] == [2, 1]
    assert said == []


def test_a_message_of_another_format_is_skipped(group, tmp_path, said, monkeypatch):
    zero, one = group(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr("tdmpc.merging.messages.FORMAT", 99)
        publish(one, 1)
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0]
    assert said == ["merging without worker 1: its message is not of format 1"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"x": torch.tensor([torch.nan])}, "is not finite: x"),
        ({"x": torch.zeros(2)}, r"is of another model: x is float32 \[2\]"),
    ],
    ids=["not finite", "other shape"],
)
def test_weights_that_have_no_mean_with_ours_are_skipped(group, value, reason):
    zero, one = group(0, 1)
    publish(one, 1, value)
    publish(zero, 1)
    own, theirs = zero.headers(1)
    assert zero.read(own)["x"].item() == 1
    with pytest.raises(UnusableMessage, match=reason):
        zero.read(theirs)


def test_messages_of_another_experiment_are_ignored_and_waited_past(group, tmp_path, fake, said):
    zero, one = group(0, 1)
    publish(one, 1)
    one.group = "another"
    publish(one, 2)
    (tmp_path / "worker-1.round-1.safetensors").unlink()
    one.group = zero.group
    fake.after(3, lambda: publish(one, 2))
    publish(zero, 2)
    assert workers_of(zero.headers(2)) == [0, 1]
    assert said == [f"ignoring messages of worker 1 in {tmp_path}, of another experiment"]


def test_a_message_under_a_wrong_name_is_skipped(group, tmp_path, said):
    zero, one = group(0, 1)
    publish(one, 1)
    (tmp_path / "worker-1.round-1.safetensors").rename(tmp_path / "worker-1.round-2.safetensors")
    publish(zero, 2)
    assert workers_of(zero.headers(2)) == [0]
    assert said == ["merging without worker 1: its message isn't what its name says"]


def test_a_message_that_is_deleted_before_it_is_read_is_skipped(group, tmp_path):
    zero, one = group(0, 1)
    publish(one, 1)
    publish(zero, 1)
    header = zero.headers(1)[1]
    (tmp_path / "worker-1.round-1.safetensors").unlink()
    with pytest.raises(UnusableMessage, match="is gone"):
        zero.read(header)


# What is in the folder


def test_a_worker_keeps_its_last_two_messages(group, tmp_path):
    zero, one = group(0, 1)
    for round in (8, 9, 10):
        publish(zero, round)
        publish(one, round)
    messages = [name for name in names(tmp_path) if name.endswith(".safetensors")]
    assert messages == [f"worker-{worker}.round-{round}.safetensors" for worker in (0, 1) for round in (10, 9)]
    assert [name for name in names(tmp_path) if name.endswith(".part")] == []


def test_a_worker_that_goes_back_to_its_checkpoint_takes_its_later_messages_back(group, tmp_path, fake):
    zero, one = group(0, 1)
    for round in (5, 6, 7):
        publish(one, round)
    one = restarted(one, fake)
    assert one.folder.rounds(1) == [6, 7]
    publish(one, 6)
    assert one.folder.rounds(1) == [6]
    publish(zero, 6)
    assert [header.round for header in zero.headers(6)] == [6, 6]
    one.close()


def test_totals_are_there_for_all_and_survive_a_resume(group, tmp_path, fake):
    zero, one = group(0, 1)
    zero.report(Totals(steps=300, updates=100, merges=3, last_return=7.5, elapsed_s=60.0))
    one.finish(Totals(steps=500))
    statuses = read_statuses(tmp_path)
    assert [(status.finished, status.totals.steps) for status in statuses.values()] == [(False, 300), (True, 500)]
    zero = restarted(zero, fake)
    one = restarted(one, fake, resuming=False)
    statuses = read_statuses(tmp_path)
    assert [(status.finished, status.totals.steps) for status in statuses.values()] == [(False, 300), (False, 0)]
    zero.close()
    one.close()


def test_a_folder_that_cannot_be_written_to_is_refused_in_one_line(tmp_path, monkeypatch, group):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExchangeError, match="cannot be written to"):
        filesystem(tmp_path / "file/group", 0).join(resuming=False, overwrite=False)
    (zero,) = group(0)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExchangeError, match="No space left"):
        publish(zero, 1)


# Joining


def test_a_folder_of_other_settings_is_refused_with_what_differs(group, tmp_path):
    (zero,) = group(0)
    zero.close()
    other = filesystem(tmp_path, 0, fingerprint=FINGERPRINT | {"model_size": 1}, every=50)
    with pytest.raises(ExchangeError, match=r"model_size: 5 before, 1 now; every: 100 before, 50 now") as error:
        other.join(resuming=True, overwrite=False)
    assert str(tmp_path) in str(error.value)
    assert "overwrite=true" in str(error.value)
    assert "exp_name" in str(error.value)
    assert "\n" not in str(error.value)
    zero.join(resuming=True, overwrite=False)  # the one that was refused holds nothing


def test_a_folder_of_other_settings_is_replaced_on_request_unless_somebody_is_in_it(group, tmp_path):
    zero, one = group(0, 1)
    publish(zero, 1)
    publish(one, 1)
    before = zero.group
    zero.close()
    other = filesystem(tmp_path, 0, fingerprint=FINGERPRINT | {"model_size": 1})
    with pytest.raises(ExchangeError, match="still running in it: worker 1"):
        other.join(resuming=False, overwrite=True)
    one.close()
    other.join(resuming=False, overwrite=True)
    assert other.group != before
    assert list(read_statuses(tmp_path)) == [0]
    assert [name for name in names(tmp_path) if name.endswith(".safetensors")] == []
    other.close()


def test_what_an_earlier_experiment_left_is_refused_or_replaced(group, tmp_path, fake):
    zero, one = group(0, 1)
    publish(zero, 1)
    publish(one, 1)
    before = zero.group
    zero.close()
    one.close()
    with pytest.raises(ExchangeError, match=r"messages of worker 0 of an earlier experiment; overwrite=true"):
        zero.join(resuming=False, overwrite=False)
    zero.join(resuming=False, overwrite=True)
    one.join(resuming=False, overwrite=True)  # started with the same command, and finds itself in the new one
    assert zero.group == one.group != before
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0]


@pytest.mark.parametrize("first", [0, 1])
def test_of_workers_that_start_together_the_first_to_join_replaces_an_earlier_experiment(group, tmp_path, first):
    """Worker 0 is the control and has left no message; the other one is about to join."""
    exchanges = group(0, 1, 2, members=(1, 2))
    for exchange in exchanges[1:]:
        publish(exchange, 1)
    for exchange in exchanges:
        exchange.close()
    before, joining, waiting = exchanges[0].group, exchanges[first], exchanges[1 - first]
    with FileLock(tmp_path / f"worker-{1 - first}.lock"):
        (tmp_path / f"worker-{1 - first}.json").unlink()
        joining.join(resuming=False, overwrite=True)
    waiting.join(resuming=False, overwrite=True)
    assert joining.group == waiting.group != before
    assert [name for name in names(tmp_path) if name.endswith(".safetensors")] == []


def test_a_worker_that_starts_again_while_others_run_takes_its_place(group, tmp_path):
    zero, one = group(0, 1)
    for round in (1, 2):
        publish(one, round)
    one.close()
    for overwrite in (False, True):
        one.join(resuming=False, overwrite=overwrite)
        assert one.group == zero.group
        assert one.folder.rounds(1) == []  # its next message is of round 1 again
        one.close()


def test_a_worker_that_had_published_nothing_joins_again(group):
    (zero,) = group(0)
    before = zero.group
    zero.close()
    zero.join(resuming=False, overwrite=False)
    assert zero.group == before


def test_a_resumed_worker_continues_at_its_round(group, fake, said):
    zero, one = group(0, 1)
    for round in (1, 2):
        publish(zero, round)
        publish(one, round)
    one.close()
    publish(zero, 3)
    assert workers_of(zero.headers(3)) == [0]
    one.join(resuming=True, overwrite=False)
    publish(one, 3)
    assert workers_of(one.headers(3)) == [0, 1]
    fake.after(3, lambda: publish(one, 4))
    assert merge(zero, Mean(), {"x": torch.tensor([0.0])}, 4) == [0, 1]
    assert said == ["merging without worker 1: it has stopped", "merging with worker 1 again"]


def test_two_processes_cannot_be_the_same_worker(group, tmp_path, monkeypatch):
    (zero,) = group(0)
    monkeypatch.setattr(module, "OWN_LOCK_S", 0.01)
    with pytest.raises(ExchangeError, match="worker 0 is running in it"):
        filesystem(tmp_path, 0).join(resuming=True, overwrite=True)
    assert held(zero.folder.lock(0))


def test_a_damaged_group_file_is_refused_or_replaced(group, tmp_path):
    (zero,) = group(0)
    zero.close()
    (tmp_path / "group.json").write_text("{")
    with pytest.raises(ExchangeError, match=r"group\.json that cannot be read"):
        zero.join(resuming=True, overwrite=False)
    zero.join(resuming=True, overwrite=True)
    assert zero.folder.group_id() == zero.group


def test_workers_that_resume_together_wait_for_each_other(group, fake, said):
    zero, one = group(0, 1)
    for exchange in (zero, one):
        publish(exchange, 1)
        exchange.close()
    zero.join(resuming=True, overwrite=False)
    publish(zero, 2)
    fake.after(3, lambda: one.join(resuming=True, overwrite=False))
    fake.after(5, lambda: publish(one, 2))
    assert workers_of(zero.headers(2)) == [0, 1]
    assert said == []


def test_one_that_does_not_come_back_is_waited_for_once(group, fake, said):
    zero, one = group(0, 1)
    for exchange in (zero, one):
        publish(exchange, 1)
        exchange.close()
    zero.join(resuming=True, overwrite=False)
    for round in (2, 3):
        publish(zero, round)
        assert workers_of(zero.headers(round)) == [0]
    assert zero.take_costs().wait_s == pytest.approx(10)
    assert said == ["merging without worker 1: it didn't come within 10 s"]


# Locks


def test_where_locks_do_nothing_workers_still_meet(tmp_path, fake, said, monkeypatch):
    monkeypatch.setattr(FileLock, "acquire", lambda self, *args, **kwargs: None)
    zero, one = (filesystem(tmp_path, worker, fake, said=said, members=(0, 1)) for worker in (0, 1))
    for exchange in (zero, one):
        exchange.join(resuming=False, overwrite=False)
    assert zero.group == one.group
    assert said == [f"warning: no locks in {tmp_path}; who ends early is waited for until the timeout"] * 2
    fake.after(3, lambda: publish(one, 1))
    publish(zero, 1)
    assert workers_of(zero.headers(1)) == [0, 1]
    publish(zero, 2)
    assert workers_of(zero.headers(2)) == [0]
    assert fake.now == pytest.approx(113, abs=0.1)


def test_where_there_are_no_locks_at_all_workers_still_meet(tmp_path, said, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    zero, one = (filesystem(tmp_path, worker, said=said, members=(0, 1)) for worker in (0, 1))
    for exchange in (zero, one):
        exchange.join(resuming=False, overwrite=False)
        publish(exchange, 1)
    assert workers_of(zero.headers(1)) == [0, 1]
    assert len([line for line in said if "No locks available" in line]) == 2


def test_a_lock_that_is_held_too_long_is_gone_without(tmp_path, said):
    path = tmp_path / "group.lock"
    with locked(path, said.append), locked(path, said.append, timeout_s=0.02):
        pass
    assert said == [f"warning: going on without the lock {path} (held for 0.02 s)"]
    assert held(path) is False


def increment(folder: Path, times: int) -> None:
    counter = folder / "counter"
    for _ in range(times):
        with locked(folder / "group.lock", print):
            counter.write_text(str(int(counter.read_text()) + 1))


def test_eight_processes_that_count_under_the_lock_lose_nothing(tmp_path):
    (tmp_path / "counter").write_text("0")
    counting = [processes.Process(target=increment, args=(tmp_path, 200)) for _ in range(8)]
    for process in counting:
        process.start()
    for process in counting:
        process.join(timeout=60)
    assert [process.exitcode for process in counting] == [0] * 8
    assert (tmp_path / "counter").read_text() == "1600"


def wait_forever(ready):
    ready.set()
    time.sleep(600)


def hold_group_lock(folder, ready):
    with locked(folder / "group.lock", print):
        wait_forever(ready)


def join_and_wait(folder, ready):
    filesystem(folder, 1, members=(0, 1)).join(resuming=False, overwrite=False)
    wait_forever(ready)


def join_and_fork(folder, ready):
    exchange = filesystem(folder, 1, members=(0, 1))
    exchange.join(resuming=False, overwrite=False)
    if os.fork() == 0:  # as an environment does in a process of its own
        (folder / "child").write_text(str(os.getpid()))
        wait_forever(ready)
    time.sleep(600)


def write_for_ever(folder, ready):
    exchange = filesystem(folder, 1, members=(0, 1))
    exchange.join(resuming=False, overwrite=False)
    os.fsync = lambda descriptor: wait_forever(ready)
    publish(exchange, 1)


@contextlib.contextmanager
def killed(target, folder):
    """Start a process, wait until it is ready, and kill it."""
    ready = processes.Event()
    process = processes.Process(target=target, args=(folder, ready))
    process.start()
    assert ready.wait(timeout=60)
    process.kill()
    process.join()
    yield
    process.close()


def test_a_lock_is_free_when_its_holder_is_killed(tmp_path, said):
    with killed(hold_group_lock, tmp_path), locked(tmp_path / "group.lock", said.append, timeout_s=1):
        assert said == []


def test_a_worker_killed_before_its_first_round_is_not_waited_for(tmp_path, fake, said, group):
    (zero,) = group(0, members=(0, 1))
    with killed(join_and_wait, tmp_path):
        publish(zero, 1)
        assert workers_of(zero.headers(1)) == [0]
        assert fake.now == 100
        assert said == ["merging without worker 1: it has stopped"]


def test_a_killed_worker_is_dead_though_processes_that_it_had_forked_live_on(tmp_path, fake, group):
    (zero,) = group(0, members=(0, 1))
    with killed(join_and_fork, tmp_path):
        publish(zero, 1)
        zero.headers(1)
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        assert fake.now == 100


def test_a_worker_killed_while_writing_leaves_no_message_and_is_cleaned_up_by_its_next_start(tmp_path, fake, group):
    (zero,) = group(0, members=(0, 1))
    with killed(write_for_ever, tmp_path):
        assert len(zero.folder.parts(1)) == 1
        assert zero.folder.rounds(1) == []
        (one,) = group(1, members=(0, 1))
        assert zero.folder.parts(1) == []
        publish(one, 1)
        publish(zero, 1)
        assert workers_of(zero.headers(1)) == [0, 1]
