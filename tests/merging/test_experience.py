"""Episodes that workers give each other through a folder; an episode is one number here."""

import io
import os
from contextlib import nullcontext

import pytest
import torch

from tdmpc.merging.exchange import ExchangeError
from tdmpc.merging.experience import Experience
from tdmpc.merging.merger import Abandoned, Merger, Rounds
from tdmpc.merging.messages import EPISODES, FORMAT, KINDS, Totals, read_header, write_message
from tdmpc.merging.strategies import Mean
from tests.merging.builders import FakeTime, filesystem
from tests.merging.test_merger import never, weights


class Numbers:
    """Episodes that are numbers: those played here, and those taken from others, each with its worker."""

    def __init__(self):
        self.played, self.taken, self._given = [], [], 0

    def finished(self):
        return {"number": torch.tensor(self.played[self._given :], dtype=torch.float32)}

    def given(self):
        self._given = len(self.played)

    def problem(self, episodes):
        return None if list(episodes) == ["number"] else "has other episodes"

    def take(self, worker, episodes):
        new = [(worker, number) for number in episodes["number"].tolist() if (worker, number) not in self.taken]
        self.taken += new
        return len(new)

    def state_dict(self):
        return {"played": list(self.played), "taken": list(self.taken), "given": self._given}

    def load_state_dict(self, state):
        self.played, self.taken = list(state["played"]), [tuple(pair) for pair in state["taken"]]
        self._given = state["given"]


class Worker:
    """A worker that plays episode after episode, and merges when it is told to.

    Args:
        folder: of the group.
        number: of the worker; that of its first episode is a thousand times as much.
        settings: of its exchange, and `live`, the weights that it shares.
    """

    def __init__(self, folder, number, time=None, resuming=False, live=None, members=(1, 2), **settings):
        self.said, self.episodes, self.number = [], Numbers(), number
        self.exchange = filesystem(
            folder, number, time, members=members, said=self.said, **({"sync": False} | settings)
        )
        self.merger = Merger(
            self.exchange,
            Mean(),
            lambda: live or {},
            Rounds(start=0, every=1, end=1000),
            worker=number,
            announce=self.said.append,
            section=lambda name: nullcontext(),
            common_start=True,
            collective=False,
            experience=Experience(self.exchange, self.episodes, number),
        )
        self._joining = {"resuming": resuming, "overwrite": False}

    def join(self, step=0):
        self.merger.join(step, **self._joining)
        return self

    def play(self, count=1):
        begin = 1000 * self.number + len(self.episodes.played)
        self.episodes.played += range(begin, begin + count)
        return self

    def merge(self, round):
        return self.merger.merge(round, 0, never)

    @property
    def taken(self):
        return [int(number) for _, number in self.episodes.taken]

    def checkpoint(self):
        stream = io.BytesIO()
        torch.save(self.merger.state_dict(), stream)
        stream.seek(0)
        return torch.load(stream, weights_only=True)

    def killed_and_continued(self, state):
        """Return the worker that another process makes of a checkpoint after this one was killed."""
        self.exchange.close()
        continued = Worker(self.exchange.folder.path, self.number, resuming=True, sync=self.exchange.sync)
        continued.merger.load_state_dict(state)
        return continued.join()


def two(folder, **settings):
    return [Worker(folder, number, **settings).join() for number in (1, 2)]


def test_everyone_gets_what_the_others_have_played_once_and_nothing_of_its_own(tmp_path):
    workers = [Worker(tmp_path, number, members=(1, 2, 3)).join() for number in (1, 2, 3)]
    for round in range(1, 6):
        for worker in workers:
            worker.play(worker.number).merge(round)
    for worker in workers:
        worker.merge(6)
    for worker in workers:
        others = [other for other in workers if other is not worker]
        assert sorted(worker.taken) == sorted(number for other in others for number in other.episodes.played)


def test_a_round_counts_what_it_took_and_changes_no_weights(tmp_path):
    one, two_ = two(tmp_path)
    one.play(3).merge(1)
    merged = two_.merge(1)
    assert not merged.changed
    assert merged.metrics["merge/episodes_read"] == 3
    assert merged.metrics["merge/peers"] == 1
    assert merged.metrics["merge/read_bytes"] == 3 * 4
    assert merged.metrics["merge/skipped"] == 0
    assert "merge/distance" not in merged.metrics


def test_with_both_the_weights_are_merged_as_without_experience(tmp_path):
    lives = [weights(1), weights(3)]
    workers = [Worker(tmp_path, number, live=live).join() for number, live in zip((1, 2), lives, strict=True)]
    workers[0].play(2).merge(1)
    merged = workers[1].merge(1)
    assert merged.changed
    assert merged.metrics["merge/episodes_read"] == 2
    assert [live["model.w"].tolist() for live in lives] == [[1, 1], [2, 2]]


def test_one_that_is_slower_gets_what_it_was_too_late_for_and_ten_rounds_stay(tmp_path):
    fast, slow = two(tmp_path)
    for round in range(1, 13):
        fast.play().merge(round)
    slow.play().merge(1)
    assert slow.taken == [1000 + number for number in range(2, 12)]
    fast.play().merge(13)
    assert fast.taken == [2000]
    slow.merge(2)
    assert slow.taken[-1] == 1012
    assert fast.exchange.folder.rounds(1, EPISODES) == list(range(4, 14))


def test_what_a_worker_left_before_it_ended_or_died_is_taken(tmp_path):
    gone, here = two(tmp_path)
    gone.play(2).merge(1)
    gone.exchange.finish(Totals())
    gone.exchange.close()
    here.merge(500)  # far beyond the age at which weights are given up
    assert here.taken == [1000, 1001]


def test_who_waits_for_all_takes_nothing_of_a_later_round(tmp_path):
    one, other = two(tmp_path, sync=True, timeout_s=0.1)
    other.play().merge(1)
    other.play().merge(2)
    one.merge(1)
    assert one.taken == [2000]
    one.merge(2)
    assert one.taken == [2000, 2001]


def test_who_sees_a_worker_in_a_round_finds_its_episodes(tmp_path):
    fake = FakeTime()
    one, other = (Worker(tmp_path, number, fake, sync=True).join() for number in (1, 2))
    fake.after(3, lambda: other.play().merge(1))
    one.merge(1)
    assert one.taken == [2000]


def test_one_that_is_killed_and_goes_back_neither_takes_nor_gives_an_episode_twice(tmp_path):
    one, other = two(tmp_path)
    other.play(2).merge(1)
    one.play(2).merge(1)
    state = one.checkpoint()
    other.play(2).merge(2)
    one.play(2).merge(2)
    other.merge(3)
    assert other.taken == [1000, 1001, 1002, 1003]
    one = one.killed_and_continued(state)
    assert one.taken == [2000, 2001]
    one.play(2).merge(2)
    other.merge(4)
    one.play().merge(3)
    other.merge(5)
    assert one.taken == [2000, 2001, 2002, 2003]
    assert other.taken == [1000, 1001, 1002, 1003, 1004]
    assert not any("episodes" in text for text in one.said + other.said)


def test_a_round_that_a_stop_broke_off_gives_the_same_again(tmp_path):
    one, other = two(tmp_path)
    one.play(2)
    headers = one.exchange.headers

    def stop(round):
        raise Abandoned

    one.exchange.headers = stop
    assert one.merge(1) is None
    one.exchange.headers = headers
    for _ in range(2):  # once before the round comes to its end, once after
        other.merge(1)
        assert other.taken == [1000, 1001]
        one = one.killed_and_continued(one.checkpoint()) if _ == 0 else one
        one.merge(1)
    one.play().merge(2)
    other.merge(2)
    assert other.taken == [1000, 1001, 1002]


def test_what_a_full_disk_kept_back_is_given_in_the_next_round(tmp_path, monkeypatch):
    one, other = two(tmp_path)
    share = one.exchange.share

    def full(header, episodes):
        raise ExchangeError("cannot be written to (No space left on device)")

    one.play(2)
    with monkeypatch.context() as patch:
        patch.setattr(one.exchange, "share", full)
        assert one.merge(1).metrics == {}
    with monkeypatch.context() as patch:  # the episodes find room, the weights don't
        patch.setattr(one.exchange, "publish", full)
        assert one.merge(2).metrics == {}
    other.merge(1)
    assert other.taken == [1000, 1001]
    assert one.exchange.share == share
    one.play().merge(3)
    other.merge(2)
    assert other.taken == [1000, 1001, 1002]
    assert len(one.said) == 1


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def ruin(path):
    write_message(path, read_header(path), {"number": torch.tensor([1.0, torch.nan])})


def rename(path):
    write_message(path, read_header(path), {"name": torch.zeros(2)})


def age(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tdmpc.merging.messages.FORMAT", FORMAT + 1)
        write_message(path, read_header_of_any_format(path), {"number": torch.zeros(2)})


def read_header_of_any_format(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tdmpc.merging.messages.FORMAT", FORMAT)
        return read_header(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "cannot be read: "),
        (flip, "is damaged: its checksum is wrong"),
        (ruin, "is not finite: number"),
        (rename, "has other episodes"),
        (age, f"is not of format {FORMAT}"),
    ],
)
def test_a_message_that_is_of_no_use_is_skipped_said_once_and_counted(tmp_path, damage, reason):
    one, bad, good = (Worker(tmp_path, number, members=(1, 2, 3)).join() for number in (1, 2, 3))
    for worker in (bad, good):
        worker.play(2).merge(1)
    damage(one.exchange.folder.message(2, 1, EPISODES))
    for round, skipped in ((1, 1), (2, 0)):  # it is not read again
        merged = one.merge(round)
        assert merged.metrics["merge/skipped"] == skipped
        assert merged.metrics["merge/peers"] == 2
    assert one.taken == [3000, 3001]
    (said,) = one.said
    assert said.startswith(f"merging without the episodes of worker 2: its message {reason}")
    assert "\n" not in said
    bad.play().merge(2)
    damage(one.exchange.folder.message(2, 2, EPISODES))
    assert one.merge(3).metrics["merge/skipped"] == 1
    assert one.said == [said]
    bad.play().merge(3)
    assert one.merge(4).metrics["merge/skipped"] == 0
    assert one.taken == [3000, 3001, 2003]
    assert one.said[1:] == ["merging with the episodes of worker 2 again"]


def test_episodes_of_another_experiment_are_ignored(tmp_path):
    one, other = two(tmp_path)
    group, other.exchange.group = other.exchange.group, "another"
    other.play().merge(900)
    one.merge(1)
    assert one.taken == []
    assert "merging without the episodes of worker 2: its message is of another experiment" in one.said
    other.exchange.group = group
    other.merger.round = 0
    other.play().merge(1)
    one.merge(2)
    assert one.taken == [2001]


def test_a_message_that_is_deleted_before_it_is_read_is_skipped(tmp_path, monkeypatch):
    one, other = two(tmp_path)
    other.play().merge(1)
    shared = one.exchange.shared

    def too_late(round, after):
        headers = shared(round, after)
        one.exchange.folder.message(2, 1, EPISODES).unlink()
        return headers

    monkeypatch.setattr(one.exchange, "shared", too_late)
    assert one.merge(1).metrics["merge/episodes_read"] == 0
    assert one.said == ["merging without the episodes of worker 2: its message is gone"]


def test_a_worker_killed_while_writing_has_given_nothing_and_is_cleaned_up_by_its_next_start(tmp_path, monkeypatch):
    class Kill(BaseException):
        pass

    def die(*arguments):
        raise Kill

    one, other = two(tmp_path)
    one.play()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        patch.setattr(os, "unlink", die)
        with pytest.raises(Kill):
            one.merge(1)
    other.merge(1)
    assert other.taken == []
    assert len(one.exchange.folder.parts(1)) == 1
    one = one.killed_and_continued(one.checkpoint())
    assert one.exchange.folder.parts(1) == []
    one.merge(1)
    other.merge(2)
    assert other.taken == [1000]


def test_one_that_starts_anew_takes_back_what_it_gave(tmp_path):
    one, other = two(tmp_path)
    for round in (1, 2):
        one.play().merge(round)
    one.exchange.close()
    one = Worker(tmp_path, 1).join()
    assert [one.exchange.folder.rounds(1, kind) for kind in KINDS] == [[], []]
    other.merge(1)
    assert other.taken == []


def test_one_that_goes_back_takes_its_later_messages_back(tmp_path):
    one, _ = two(tmp_path)
    one.play().merge(1)
    state = one.checkpoint()
    for round in (2, 3):
        one.play().merge(round)
    one = one.killed_and_continued(state)
    one.merge(2)
    assert [one.exchange.folder.rounds(1, kind) for kind in KINDS] == [[2], [1, 2]]


def test_a_run_that_did_not_share_before_goes_on_with_nothing_taken(tmp_path):
    experience = Experience(filesystem(tmp_path, 1), Numbers(), 1)
    before = experience.state_dict()
    experience.load_state_dict({})
    assert experience.state_dict() == before
