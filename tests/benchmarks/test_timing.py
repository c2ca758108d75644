from tdmpc.benchmarks.timing import LEAST_REPEATS, Stopwatch, Timed, Timing


class Clock:
    """A clock that only moves when somebody takes time."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        """Return a call that takes these seconds, one after the other, and the last of them from then on."""
        remaining = list(seconds)

        def call():
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


def test_the_first_call_is_told_apart_and_the_second_does_not_count():
    clock = Clock()
    timing = Stopwatch(repeats=4, budget_s=1e9, clock=clock).time(clock.takes(50, 9, 1, 2, 3, 4))
    assert timing == Timing(first_s=50, samples_s=(1, 2, 3, 4))


def test_preparing_and_waiting_before_a_call_do_not_count_but_waiting_for_its_end_does():
    clock, events = Clock(), []

    def event(name, seconds):
        def call():
            events.append(name)
            clock.now += seconds

        return call

    stopwatch = Stopwatch(repeats=3, budget_s=1e9, clock=clock, synchronize=event("wait", 10))
    timing = stopwatch.time(event("call", 1), prepare=event("prepare", 100))
    assert timing == Timing(11, (11, 11, 11))
    assert events == ["prepare", "wait", "call", "wait"] * 5


def test_the_budget_ends_the_repeats_and_the_first_calls_are_outside_of_it():
    clock = Clock()
    assert Stopwatch(repeats=100, budget_s=10, clock=clock).time(clock.takes(1000, 1000, 2)).repeats == 5


def test_preparing_spends_the_budget():
    clock = Clock()
    stopwatch = Stopwatch(repeats=100, budget_s=10, clock=clock)
    assert stopwatch.time(clock.takes(1), prepare=clock.takes(1)).repeats == 5


def test_there_are_three_repeats_whatever_they_take():
    clock = Clock()
    assert Stopwatch(repeats=100, budget_s=1e-9, clock=clock).time(clock.takes(60)).repeats == LEAST_REPEATS == 3


def test_calls_that_are_timed_in_turn_have_their_rounds_in_common():
    clock, order = Clock(), []

    def named(name, seconds):
        takes = clock.takes(*seconds)

        def call():
            order.append(name)
            takes()

        return Timed(call)

    stopwatch = Stopwatch(repeats=3, budget_s=1e9, clock=clock)
    one, other = stopwatch.time_in_turn([named("a", (9, 8, 1, 2, 3)), named("b", (7, 6, 10, 20, 30))])
    assert (one, other) == (Timing(9, (1, 2, 3)), Timing(7, (10, 20, 30)))
    assert order == ["a", "b"] * 5


def test_median_minimum_and_quantile():
    timing = Timing(first_s=99, samples_s=(5, 1, 4, 2, 3, 11, 6, 7, 8, 9, 10))
    assert (timing.median_s, timing.min_s, timing.p90_s, timing.repeats) == (6, 1, 10, 11)
