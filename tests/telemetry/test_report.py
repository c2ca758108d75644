import json

import pytest

from tdmpc.telemetry.report import bottleneck, report, table, write_summary
from tdmpc.telemetry.timers import Timers


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def spend(timers, clock, **seconds):
    for path, duration in seconds.items():
        with timers(path):
            clock.now += duration


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.now

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def total(clock):
    timers = Timers(clock)
    with timers("update"):
        clock.now += 10
        spend(timers, clock, policy=5, model=35)
    spend(timers, clock, act=40)
    clock.now += 10
    return timers.total()


def test_the_table_has_siblings_by_time_and_closes_the_budget(total):
    lines = table(total).splitlines()
    assert [line.split()[0] for line in lines] == ["section", "update", "model", "policy", "act", "other"]
    assert "50.0 s   50.0%" in lines[1]
    assert "10.0 s   10.0%" in lines[-1]


def test_the_bottleneck_is_the_largest_time_of_its_own_with_its_gain_by_amdahl(total):
    # update has more in all, but most of it is inside its parts
    assert bottleneck(total) == (
        "bottleneck: act takes 40% of the time; without it the run would be up to 1.7 times as fast"
    )


def test_the_same_section_inside_another_is_the_same_work(clock):
    timers = Timers(clock)
    for _ in range(2):
        with timers("act"):
            spend(timers, clock, plan=15)
    with timers("evaluate"), timers("act"):
        clock.now += 5
        spend(timers, clock, plan=25)
    spend(timers, clock, update=40)
    assert bottleneck(timers.total()) == (
        "bottleneck: act/plan takes 55% of the time (evaluate/act/plan included); "
        "without it the run would be up to 2.2 times as fast"
    )


def test_the_device_says_what_the_time_went_to_where_the_host_only_waits(clock):
    device = FakeClock()
    timers = Timers(clock, new_event=lambda: FakeEvent(device))
    with timers("update"):  # the host only hands it over
        clock.now += 1
        with timers("model"):
            device.now += 60
        device.now += 10
    with timers("act"):  # and waits here
        clock.now += 99
        device.now += 30
    total = timers.total()
    assert [line.split()[-2:] for line in table(total).splitlines()[:-1]] == [
        ["max", "device"], ["30.0", "s"], ["70.0", "s"], ["60.0", "s"]
    ]  # fmt: skip
    assert bottleneck(total) == (
        "bottleneck: update/model takes 60% of the time; without it the run would be up to 2.5 times as fast"
    )


def test_a_report_of_nothing_is_no_error():
    assert "nothing was measured" in report(Timers(FakeClock()).total(), 0.0)


def test_the_summary_is_strict_json_of_the_whole_run(tmp_path, total):
    write_summary(tmp_path / "summary.json", total, {"ending": "finished"})
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["ending"] == "finished"
    assert content["wall_s"] == 100
    assert content["sections"]["update/model"]["self_s"] == 35
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
