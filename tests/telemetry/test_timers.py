import gc
import itertools
import json
import random
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack

import pytest
import torch

from tdmpc.telemetry import timers as module
from tdmpc.telemetry.timers import SectionError, Timers
from tdmpc.telemetry.window import SectionStats


class Clock:
    def __init__(self):
        self.now = 1000

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timers(clock):
    return Timers(clock)


def call(timers, clock, name, seconds):
    with timers(name):
        clock.now += seconds


def in_thread(work, *args):
    """Run work in a thread of its own and return the error it ended with, if any."""
    errors = []

    def run():
        try:
            work(*args)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def totals(window):
    return {path: stats.total_s for path, stats in window.sections.items()}


def counts(window):
    return {path: stats.count for path, stats in window.sections.items()}


def budget(window):
    return sum(stats.self_s for stats in window.sections.values()) + window.other_s


# Nesting


def test_sections_nest_by_path_and_children_do_not_count_as_self_time(timers, clock):
    clock.now += 3
    with timers("train"):
        clock.now += 10
        with timers("update"):
            clock.now += 5
            call(timers, clock, "model", 20)
        call(timers, clock, "save", 2)
    window = timers.window()
    assert totals(window) == {"train": 37, "train/save": 2, "train/update": 25, "train/update/model": 20}
    assert [stats.self_s for stats in window.sections.values()] == [10, 2, 5, 20]
    assert (window.wall_s, window.other_s) == (40, 3)
    assert window.sections["train"] == SectionStats(1, 37, 37, 37, 37, 10, 37 / 40)


def test_mean_max_and_min_are_over_the_calls_of_the_window(timers, clock):
    for seconds in (4, 1, 9, 2):
        call(timers, clock, "env", seconds)
    assert timers.window().sections["env"] == SectionStats(4, 16, 4, 9, 1, 16, 1)
    call(timers, clock, "env", 2)
    assert timers.window().sections["env"] == SectionStats(1, 2, 2, 2, 2, 2, 1)


def test_a_call_of_no_length_counts(timers, clock):
    call(timers, clock, "env", 0)
    call(timers, clock, "env", 3)
    assert timers.window().sections["env"] == SectionStats(2, 3, 1.5, 3, 0, 3, 1)


def test_a_name_inside_itself_is_a_section_of_its_own(timers, clock):
    def descend(levels):
        with timers("a"):
            clock.now += levels
            if levels > 1:
                descend(levels - 1)

    descend(3)
    window = timers.window()
    assert totals(window) == {"a": 6, "a/a": 3, "a/a/a": 1}
    assert budget(window) == window.wall_s == 6


def test_sections_are_listed_each_before_those_inside_it(timers, clock):
    for name in ("b", "a-b", "a"):
        with timers(name):
            call(timers, clock, "z", 1)
    assert list(timers.window().sections) == ["a", "a/z", "a-b", "a-b/z", "b", "b/z"]


def test_a_section_is_listed_with_all_around_it_even_if_none_has_taken_time_yet(timers, clock):
    with timers("a"):
        call(timers, clock, "b", 0)
        assert counts(timers.window()) == {"a": 0, "a/b": 1}


# Transitions


def test_record_ends_the_running_sibling_and_leaving_the_section_ends_the_last(timers, clock):
    with timers("update"):
        clock.now += 1
        timers.record("sample")
        clock.now += 2
        timers.record("learn")
        clock.now += 3
    clock.now += 4
    window = timers.window()
    assert totals(window) == {"update": 6, "update/learn": 3, "update/sample": 2}
    assert window.sections["update"].self_s == 1
    assert window.other_s == 4


def test_record_works_without_a_section_around_it_until_stop(timers, clock):
    timers.record("act")
    clock.now += 1
    timers.record("env")
    clock.now += 2
    timers.record("env")
    clock.now += 3
    timers.stop()
    clock.now += 4
    window = timers.window()
    assert totals(window) == {"act": 1, "env": 5}
    assert window.sections["env"].count == 2
    assert window.other_s == 4


def test_both_forms_mix(timers, clock):
    timers.record("a")
    with timers("x"):
        clock.now += 1
        timers.record("p")
        clock.now += 2
        timers.record("q")
        with timers("deep"):
            clock.now += 4
    timers.record("b")
    clock.now += 8
    timers.stop()
    window = timers.window()
    assert totals(window) == {"a": 7, "a/x": 7, "a/x/p": 2, "a/x/q": 4, "a/x/q/deep": 4, "b": 8}
    assert budget(window) == window.wall_s == 15


def test_one_name_serves_both_forms(timers, clock):
    timers.record("a")
    timers.stop()
    call(timers, clock, "a", 5)
    with timers("a"):
        timers.record("b")
    assert counts(timers.window()) == {"a": 3, "a/b": 1}


# Exceptions and misuse


def test_an_exception_passes_and_its_samples_are_kept(timers, clock):
    def fail():
        with timers("train"), timers("update"):
            timers.record("learn")
            clock.now += 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    call(timers, clock, "save", 1)
    window = timers.window()
    assert totals(window) == {"save": 1, "train": 5, "train/update": 5, "train/update/learn": 5}
    assert set(counts(window).values()) == {1}


@pytest.mark.parametrize("name", ["", "a/b", "other", "background"])
def test_names_that_cannot_be_part_of_a_path_are_refused(timers, name):
    with pytest.raises(ValueError, match=f"'{name}' cannot name a section"):
        timers(name)
    timers.record("running")
    with pytest.raises(ValueError, match="cannot name"):
        timers.record(name)
    timers.stop()


def test_reserved_names_are_free_below_the_root(timers, clock):
    with timers("a"):
        call(timers, clock, "other", 2)
        call(timers, clock, "background", 3)
    window = timers.window()
    assert totals(window) == {"a": 5, "a/background": 3, "a/other": 2}
    assert window.other_s == 0


def test_stop_refuses_what_record_did_not_begin(timers):
    with pytest.raises(SectionError, match="nothing to stop"):
        timers.stop()
    timers.record("a")
    with timers("x"), pytest.raises(SectionError, match="inside 'a/x'"):
        timers.stop()
    timers.stop()


def test_a_section_is_entered_where_it_was_made(timers, clock):
    section = timers("a")
    with timers("b"), pytest.raises(SectionError, match="'a' was made inside 'other' of"), section:
        pass
    with section, pytest.raises(SectionError), section:
        pass
    assert isinstance(in_thread(section.__enter__), SectionError)
    with section:
        clock.now += 1
    assert counts(timers.window()) == {"a": 2, "b": 1}


def test_ending_out_of_order_is_an_error_and_ends_all_inside(timers, clock):
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(timers("a"))
    inner.enter_context(timers("b"))
    clock.now += 1
    with pytest.raises(SectionError, match="'a' ended out of order"):
        outer.close()
    clock.now += 1
    with pytest.raises(SectionError, match="'a/b' ended out of order"):
        inner.close()
    call(timers, clock, "c", 1)
    assert totals(timers.window()) == {"a": 1, "a/b": 1, "c": 1}


def test_misuse_does_not_hide_an_error_on_its_way(timers):
    def fail():
        with timers("a"):
            timers("b").__enter__()
            raise KeyError("the cause")

    with pytest.raises(KeyError):
        fail()
    assert counts(timers.window()) == {"a": 1, "a/b": 1}


def test_a_generator_may_yield_inside_a_section_if_what_begins_meanwhile_ends_meanwhile(timers, clock):
    def episodes():
        for _ in range(3):
            with timers("episode"):
                clock.now += 1
                yield

    for _ in episodes():
        call(timers, clock, "step", 2)
    call(timers, clock, "save", 4)
    assert totals(timers.window()) == {"episode": 9, "episode/step": 6, "save": 4}


def test_a_generator_closed_inside_a_later_section_ends_it_and_the_stack_stays_right(timers, clock):
    def generate():
        with timers("a"):
            yield

    generator = generate()
    next(generator)
    later = timers("b")
    later.__enter__()
    clock.now += 1
    generator.close()
    with pytest.raises(SectionError, match="'a/b' ended out of order"):
        later.__exit__(None, None, None)
    call(timers, clock, "c", 1)
    assert totals(timers.window()) == {"a": 1, "a/b": 1, "c": 1}


# Windows


def test_a_window_holds_what_happened_since_the_last_alone(timers, clock):
    call(timers, clock, "a", 5)
    timers.window()
    clock.now += 1
    call(timers, clock, "b", 2)
    window = timers.window()
    assert totals(window) == {"b": 2}
    assert (window.wall_s, window.other_s) == (3, 1)


def test_an_empty_window_is_empty(timers, clock):
    call(timers, clock, "a", 5)
    timers.window()
    clock.now += 7
    window = timers.window()
    assert (window.sections, window.background, window.row()) == ({}, {}, {})
    assert (window.wall_s, window.other_s, window.other_share) == (7, 7, 1)
    window = timers.window()
    assert (window.wall_s, window.other_share, window.row()) == (0, 0, {})


def test_an_open_section_gives_each_window_its_part_and_counts_where_it_ends(timers, clock):
    with timers("train"):
        timers.record("evaluate")
        clock.now += 10
        first = timers.window()
        clock.now += 5
        second = timers.window()
        timers.record("update")
        clock.now += 2
    third = timers.window()
    assert totals(first) == {"train": 10, "train/evaluate": 10}
    assert first.sections["train"] == SectionStats(0, 10, None, None, None, 0, 1)
    assert totals(second) == {"train": 5, "train/evaluate": 5}
    assert third.sections["train"] == SectionStats(1, 2, 17, 17, 17, 0, 1)
    assert third.sections["train/evaluate"] == SectionStats(1, 0, 15, 15, 15, 0, 0)
    assert [budget(window) for window in (first, second, third)] == [10, 5, 2]
    assert "time/train/mean_s" not in first.row()


def test_shares_of_the_outermost_sections_and_other_are_one(timers, clock):
    clock.now += 1
    call(timers, clock, "a", 3)
    with timers("b"):
        call(timers, clock, "c", 4)
    window = timers.window()
    assert window.sections["a"].share + window.sections["b"].share + window.other_share == 1
    assert window.sections["b/c"].share == 0.5


def test_a_row_names_every_statistic_by_path(timers, clock):
    clock.now += 2
    with timers("update"):
        call(timers, clock, "sample", 2)
        call(timers, clock, "sample", 4)
    assert timers.window().row() == {
        "time/update/mean_s": 6,
        "time/update/max_s": 6,
        "time/update/total_s": 6,
        "time/update/count": 1,
        "time/update/share": 0.75,
        "time/update/sample/mean_s": 3,
        "time/update/sample/max_s": 4,
        "time/update/sample/total_s": 6,
        "time/update/sample/count": 2,
        "time/update/sample/share": 0.75,
        "time/other/total_s": 2,
        "time/other/share": 0.25,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_closes_whatever_happens(timers, clock, seed):
    rng, windows, began = random.Random(seed), [], clock.now

    def act(depth):
        for _ in range(rng.randrange(5)):
            clock.now += rng.randrange(4)
            choice = rng.random()
            if choice < 0.5 and depth:
                with timers(rng.choice("ab")):
                    act(depth - 1)
            elif choice < 0.8:
                timers.record(rng.choice("ab"))
            else:
                windows.append(timers.window())

    for _ in range(30):
        act(4)
    windows.append(timers.window())
    assert all(budget(window) == window.wall_s for window in windows)
    assert all(stats.self_s >= 0 for window in windows for stats in window.sections.values())
    run = timers.total()
    assert run.wall_s == clock.now - began == sum(window.wall_s for window in windows)
    assert totals(run) == {path: sum(totals(window).get(path, 0) for window in windows) for path in totals(run)}


# The whole run


def test_totals_cover_all_windows_and_leave_the_one_under_way(timers, clock):
    call(timers, clock, "a", 5)
    timers.window()
    call(timers, clock, "a", 1)
    expected = SectionStats(2, 6, 3, 5, 1, 6, 1)
    assert timers.total().sections["a"] == timers.total().sections["a"] == expected
    assert timers.window().sections["a"] == SectionStats(1, 1, 1, 1, 1, 1, 1)
    assert timers.total().sections["a"] == expected


def test_totals_include_earlier_resumes(timers, clock):
    clock.now += 1
    call(timers, clock, "a", 5)
    timers.window()
    with timers("save"):
        clock.now += 2
        state = json.loads(json.dumps(timers.state_dict(), allow_nan=False))
    later = Clock()
    resumed = Timers(later)
    call(resumed, later, "load", 3)
    resumed.load_state_dict(state)
    call(resumed, later, "a", 2)
    run = resumed.total()
    assert (run.wall_s, run.other_s) == (13, 1)
    assert run.sections["a"] == SectionStats(2, 7, 3.5, 5, 2, 7, 7 / 13)
    assert run.sections["save"] == SectionStats(0, 2, None, None, None, 2, 2 / 13)
    assert totals(resumed.window()) == {"a": 2, "load": 3}
    assert resumed.total() == run


def test_a_state_of_something_else_is_refused(timers):
    with pytest.raises(TypeError):
        timers.load_state_dict({"a": {"speed": 1.0}})


# Threads


def test_other_threads_nest_from_their_own_root_and_stay_out_of_the_budget(timers, clock):
    def write():
        with timers("write"):
            timers.record("flush")
            clock.now += 4

    with timers("save"):
        clock.now += 1
        in_thread(write)
        in_thread(write)
    window = timers.window()
    assert totals(window) == {"save": 9}
    assert budget(window) == window.wall_s == 9
    assert list(window.background) == ["background/write", "background/write/flush"]
    assert window.background["background/write"] == SectionStats(2, 8, 4, 4, 4, 0, 8 / 9)
    assert window.row()["time/background/write/flush/count"] == 2
    assert timers.total().background == window.background


def test_threads_open_at_the_same_time_do_not_mix(timers, clock):
    inside, done = threading.Barrier(3, timeout=10), threading.Barrier(3, timeout=10)

    def work(name):
        with timers(name):
            inside.wait()
            done.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    with timers("main"):
        inside.wait()
        clock.now += 5
        window = timers.window()
        done.wait()
    for thread in threads:
        thread.join()
    assert totals(window) == {"main": 5}
    assert {path: stats.share for path, stats in window.background.items()} == {"background/a": 1, "background/b": 1}
    assert {stats.count for stats in timers.window().background.values()} == {1}


def test_the_stack_of_a_thread_that_ended_serves_the_next(timers, clock):
    def leave_running():
        timers.record("work")
        clock.now += 1

    for _ in range(20):
        in_thread(leave_running)
        clock.now += 1
    assert len(timers._stacks) == 2
    assert timers.window().background["background/work"].count == 20
    clock.now += 1
    assert timers.window().background == {}


def test_windows_may_end_in_another_thread_while_sections_run():
    clock = itertools.count().__next__  # every reading differs, so that none can be lost or counted twice unseen
    timers, windows, calls = Timers(clock), [], 5_000
    begun, done = threading.Event(), threading.Event()

    def end_windows() -> None:
        while not done.is_set():
            windows.append(timers.window())
            begun.set()

    thread = threading.Thread(target=end_windows)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        begun.wait()
        for _ in range(calls):
            with timers("a"):
                timers.record("b")
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    windows.append(timers.window())
    assert sum(window.wall_s for window in windows) == clock() - 1
    assert all(budget(window) == window.wall_s for window in windows)
    assert all(stats.self_s >= 0 for window in windows for stats in window.sections.values())
    assert sum(counts(window).get("a", 0) for window in windows) == timers.total().sections["a/b"].count == calls


# Cost


def test_memory_does_not_grow_with_the_number_of_sections(timers, clock):
    def loop(calls):
        for _ in range(calls):
            with timers("a"):
                timers.record("b")
                timers.record("c")
                clock.now += 1
        timers.window()

    loop(100)
    gc.collect()
    tracemalloc.start()
    loop(100)
    before, _ = tracemalloc.get_traced_memory()
    loop(5000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2000
    assert [section.path for section in timers._stacks[0].root.walk()] == ["other", "a", "a/b", "a/c"]


def test_the_budget_closes_on_the_real_clock():
    began, timers = time.perf_counter(), Timers()
    for _ in range(30):
        with timers("a"):
            sum(range(1000))
    window = timers.window()
    assert window.wall_s == pytest.approx(time.perf_counter() - began, abs=0.01)
    assert budget(window) == pytest.approx(window.wall_s, rel=1e-12)


def test_thirty_sections_take_less_than_one_percent_of_a_tenth_of_a_second():
    timers, costs = Timers(), []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(30):
            with timers("a"):
                pass
        costs.append(time.perf_counter() - began)
    assert min(costs) < 0.01 * 0.1


def test_the_overhead_is_the_cost_of_a_section_for_every_call_of_the_run(timers, clock):
    assert timers.overhead_s == 0
    call(timers, clock, "a", 1)
    timers.window()
    with timers("a"):
        timers.record("b")
    random_state = torch.random.get_rng_state()
    assert timers.overhead_s == 3 * timers.section_cost_s > 0
    assert torch.equal(torch.random.get_rng_state(), random_state)


# The device's time


class Device:
    """Makes events that it passes when told to; its clock is the host's plus a lag."""

    def __init__(self, clock):
        self.clock, self.events, self.reads, self.queries, self.passed = clock, 0, 0, 0, -1

    def new_event(self):
        self.events += 1
        return DeviceEvent(self)

    def finish(self):
        self.passed = self.clock.now


class DeviceEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.clock.now

    def query(self):
        self.device.queries += 1
        return self.at <= self.device.passed

    def elapsed_time(self, end):
        assert end.at <= self.device.passed, "reading would have waited"
        self.device.reads += 1
        return (end.at - self.at) * 1000.0


@pytest.fixture
def device(clock):
    return Device(clock)


@pytest.fixture
def device_timers(clock, device):
    return Timers(clock, torch.device("cuda"), device.new_event)


def test_events_are_read_only_when_the_window_ends(device_timers, clock, device):
    with device_timers("update"):
        for seconds in (1, 5):
            device_timers.record("model")
            clock.now += seconds
            device.finish()
    assert (device.reads, device.queries) == (0, 0)
    stats = device_timers.window().sections["update/model"]
    assert (stats.device_total_s, stats.device_mean_s, stats.device_max_s) == (6, 3, 5)
    assert device_timers.total().sections["update"].device_total_s == 6
    assert device.reads == 3


def test_events_that_the_device_has_not_passed_count_in_a_later_window(device_timers, clock, device):
    call(device_timers, clock, "a", 2)
    device.finish()
    call(device_timers, clock, "a", 3)
    first = device_timers.window()
    device.finish()
    second = device_timers.window()
    assert first.sections["a"].device_total_s == 2
    assert first.row()["time/a/device_mean_s"] == 2
    assert (second.sections["a"].count, second.sections["a"].device_total_s) == (0, 3)
    assert device_timers.total().sections["a"].device_total_s == 5


def test_events_are_used_again(device_timers, clock, device):
    for _ in range(10):
        call(device_timers, clock, "a", 1)
        call(device_timers, clock, "a", 1)
        device.finish()
        device_timers.window()
    assert device.events == 4


def test_a_long_window_reads_what_the_device_has_passed_rather_than_grow(device_timers, clock, device, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    for _ in range(20):
        device.finish()
        call(device_timers, clock, "a", 1)
    device.finish()
    assert device.events == 8
    assert device_timers.window().sections["a"].device_total_s == 20


def test_an_exception_leaves_its_device_time(device_timers, clock, device):
    def fail():
        with device_timers("a"):
            clock.now += 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    device.finish()
    assert device_timers.window().sections["a"].device_total_s == 1


def test_the_cpu_has_no_device_time(clock):
    timers = Timers(clock, torch.device("cpu"))
    call(timers, clock, "a", 1)
    window = timers.window()
    assert window.sections["a"].device_total_s is None
    assert not any("device" in name for name in window.row())
