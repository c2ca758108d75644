"""Where the time goes: sections of the loop, nested by path, counted over windows and over the whole run.

Two forms, which mix:

    with timers("update"):  # a section: `update`
        timers.record("sample")  # a transition: `update/sample` begins
        timers.record("learn")  # `update/sample` ends and `update/learn` begins; leaving `update` ends it
        with timers("model"):  # `update/learn/model`: inside whatever runs
            ...

Budget. Every moment of a thread is charged to the innermost section open in it, as that section's self time, or to
`other` when none is open. So self times and `other` add up to wall time by construction, and a section's total is its
self time and that of all sections inside it. A window's end splits an open section: each window gets the part that
elapsed in it, while the call counts (count, mean, max, min) with its full length in the window in which it ends.

Threads. The thread that makes the timers owns the budget. Every other thread nests on its own, from its own root; their
sections are merged by path under `background/` and stay out of the budget, as they run beside it.

Memory. One node a path, with running numbers only; the nodes of a thread that has ended serve the next new thread.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol

import torch

from tdmpc.telemetry.window import BACKGROUND, OTHER, Tally, Window, merge, summarise

MAX_PENDING = 8192
"""Calls of a thread whose device time may wait to be read."""


class SectionError(RuntimeError):
    """Sections are begun or ended in an order in which they do not nest."""


class TimingEvent(Protocol):
    """What the timers use of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> object:
        """Mark this point of the device's current stream."""
        ...

    def query(self) -> bool:
        """Tell, without waiting, whether the device has passed the point."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this point to another."""
        ...


class Timers:
    """Time named sections of the loop.

    A name is one part of a path: no `/`, and at the root neither `other` nor `background`. Every method may be called
    from any thread.

    On CUDA every call is also put between two events on the current stream, for which the host does not wait. They are
    read when a window ends, and then only those that the device has passed; the rest counts in a later window. Should
    more than `MAX_PENDING` calls wait (a very long window), those passed are read earlier, to bound their number.
    Sections cannot begin or end while a CUDA graph is captured.

    Args:
        clock: seconds, monotonic.
        device: where the work runs; None as CPU.
        new_event: makes a timing event; None for the device's own, none on CPU.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        device: torch.device | None = None,
        new_event: Callable[[], TimingEvent] | None = None,
    ) -> None:
        self._clock, self._new_event = clock, new_event or _event_factory(device)
        self._lock = threading.RLock()
        self._past: dict[str, Tally] = {}  # windows that ended, earlier resumes included
        self._present: dict[str, Tally] = {}  # what has been drained of the window under way
        self._stacks: list[_Stack] = []
        self._local = _Local(self._stack_of_new_thread)

    def __call__(self, name: str) -> "Section":
        """Return the section of this name inside the current one, to be entered at once by `with`.

        Exceptions pass through; the call they end counts.

        Raises:
            ValueError: the name cannot be part of a path.
            SectionError: on entering, in another place or thread than this; on leaving, with sections inside it still
                open or already ended by one around it, as when a generator yields inside a section.
        """
        return self._local.stack.top.child(name)

    def record(self, name: str) -> None:
        """End the sibling that `record` began, if one runs, and begin the section of this name at the same instant.

        It ends with the next `record` or `stop` at this level, or when the enclosing section ends.

        Raises:
            ValueError: the name cannot be part of a path; the sibling runs on.
        """
        self._local.stack.switch(name)

    def stop(self) -> None:
        """End the section that `record` began.

        Raises:
            SectionError: the innermost section is none that `record` began.
        """
        self._local.stack.stop()

    def window(self) -> Window:
        """Return what happened since the last call, or since the start, and begin the next window."""
        with self._lock:
            self._drain()
            ended, self._present = self._present, {}
            merge(self._past, ended)
        return summarise(ended)

    def total(self) -> Window:
        """Return what happened in the whole run, earlier resumes included; the window under way is left as it is."""
        return summarise(self._run())

    @cached_property
    def section_cost_s(self) -> float:
        """Host seconds that one section costs on this machine, measured when first asked for (some tenths of a second).

        The median over empty sections, each after tensor operations that displace the timers from the processor's
        caches, as the work of a training loop does. In a tight loop a section costs about a tenth of that, so the
        figure is rather high than low.
        """
        return _measure_section_cost_s(self._new_event)

    @property
    def overhead_s(self) -> float:
        """Estimate of the host seconds that the timers took in the whole run: `section_cost_s` times all calls."""
        return self.section_cost_s * sum(tally.count for tally in self._run().values())

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the running numbers of the whole run by path; of a call under way, only the time so far is kept."""
        return {path: asdict(tally) for path, tally in self._run().items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put an earlier record in place of the windows that ended here; the window under way adds to it.

        Raises:
            TypeError: the state is not from `state_dict`.
        """
        with self._lock:
            self._past = {path: Tally(**numbers) for path, numbers in state.items()}

    def _run(self) -> "dict[str, Tally]":
        with self._lock:
            self._drain()
            run: dict[str, Tally] = {}
            merge(run, self._past)
            merge(run, self._present)
            return run

    def _drain(self) -> None:
        for stack in self._stacks:
            merge(self._present, stack.drain())

    def _stack_of_new_thread(self) -> "_Stack":
        with self._lock:
            for stack in self._stacks[1:]:
                if stack.adopt():
                    return stack
            self._stacks.append(_Stack(BACKGROUND if self._stacks else OTHER, self._clock, self._new_event))
            return self._stacks[-1]


class Section:
    """One path in one thread, and the context that begins and ends its calls; made by `Timers`."""

    __slots__ = ("began", "by_record", "children", "event", "is_open", "parent", "path", "stack", "tally")

    began: float
    event: TimingEvent

    def __init__(self, path: str, stack: "_Stack", parent: "Section | None" = None) -> None:
        self.path, self.stack = path, stack
        self.parent = self if parent is None else parent  # the root's is itself: it is never entered or ended
        self.children: dict[str, Section] = {}
        self.tally = Tally()
        self.is_open = self.by_record = False

    def __enter__(self) -> None:
        stack = self.stack
        with stack.lock:
            if stack.top is not self.parent or stack.ident != threading.get_ident():
                raise SectionError(
                    f"section '{self.path}' was made inside '{self.parent.path}' of thread '{stack.thread.name}' and "
                    f"is entered elsewhere (inside '{stack.top.path}' there); enter it where it is made"
                )
            stack.begin(self, stack.clock())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack = self.stack
        with stack.lock:
            nested = stack.close(self, stack.clock())
        # An error on its way says more than this one would.
        if not nested and error is None:
            raise SectionError(
                f"section '{self.path}' ended out of order: one inside it was open, or one around it had ended; "
                "a generator must not yield inside a section that other sections may begin or end around"
            )

    def child(self, name: str) -> "Section":
        """Return the section of this name inside this one."""
        try:
            return self.children[name]
        except KeyError:
            return self._add_child(name)

    def _add_child(self, name: str) -> "Section":
        path = name if self.path == OTHER else f"{self.path}/{name}"
        if not name or "/" in name or path in (OTHER, BACKGROUND):
            raise ValueError(f"'{name}' cannot name a section here: it is empty, contains '/', or is reserved")
        with self.stack.lock:
            return self.children.setdefault(name, Section(path, self.stack, self))

    def walk(self) -> "Iterator[Section]":
        """Yield this section and all inside it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class _Stack:
    """The open sections of one thread; `top` is the innermost, and each one's parent lies below it.

    The lock is for other threads that end a window meanwhile. It is re-entrant, so that a signal handler may as well.
    """

    __slots__ = ("clock", "device_clock", "ident", "lock", "mark", "root", "thread", "top")

    def __init__(
        self, root: str, clock: Callable[[], float], new_event: Callable[[], TimingEvent] | None = None
    ) -> None:
        self.clock, self.lock = clock, threading.RLock()
        self.device_clock = None if new_event is None else _DeviceClock(new_event)
        self.thread, self.ident = threading.current_thread(), threading.get_ident()
        self.root = self.top = Section(root, self)
        self.mark = clock()  # until when time has been charged

    def charge(self, now: float) -> None:
        self.top.tally.self_s += now - self.mark
        self.mark = now

    def begin(self, section: Section, now: float, by_record: bool = False) -> None:
        if self.device_clock is not None:
            section.event = self.device_clock.mark()  # first: should the device fail, nothing has begun
        self.charge(now)
        section.began, section.by_record, section.is_open = now, by_record, True
        self.top = section

    def end(self, now: float) -> None:
        self.charge(now)
        section = self.top
        section.tally.add_call(now - section.began)
        section.is_open = False
        self.top = section.parent
        if self.device_clock is not None:
            self.device_clock.end(section)

    def close(self, section: Section, now: float) -> bool:
        """End a section and all open inside it; tell whether these, if any, are its to end."""
        nested = section.is_open
        while section.is_open:
            nested &= self.top is section or self.top.by_record
            self.end(now)
        return nested

    def switch(self, name: str) -> None:
        with self.lock:
            running = self.top.by_record
            section = (self.top.parent if running else self.top).child(name)
            now = self.clock()
            if running:
                self.end(now)
            self.begin(section, now, by_record=True)

    def stop(self) -> None:
        with self.lock:
            if not self.top.by_record:
                raise SectionError(f"nothing to stop: `record` began no section inside '{self.top.path}'")
            self.end(self.clock())

    def drain(self) -> "dict[str, Tally]":
        """Return what was counted since the last call, time in open sections included."""
        with self.lock:
            self.charge(self.clock())
            if not self.thread.is_alive():
                self.close_all()
            if self.device_clock is not None:
                self.device_clock.read()
            drained = {}
            for section in self.root.walk():
                drained[section.path], section.tally = section.tally, Tally()
            return drained

    def adopt(self) -> bool:
        """Become the stack of the calling thread if the thread it had is no more."""
        with self.lock:
            if self.thread.is_alive():
                return False
            self.charge(self.clock())
            self.close_all()
            self.thread, self.ident = threading.current_thread(), threading.get_ident()
            return True

    def close_all(self) -> None:
        """End what a thread that has ended left running."""
        while self.top is not self.root:
            self.end(self.mark)


class _Local(threading.local):
    """Gives every thread its stack at first use."""

    def __init__(self, new_stack: Callable[[], _Stack]) -> None:
        self.stack = new_stack()


class _DeviceClock:
    """Times the calls of one thread by events from a pool, in the order in which the device passes them."""

    __slots__ = ("_free", "_new_event", "_pending")

    def __init__(self, new_event: Callable[[], TimingEvent]) -> None:
        self._new_event = new_event
        self._free: list[TimingEvent] = []
        self._pending: deque[tuple[Section, TimingEvent, TimingEvent]] = deque()

    def mark(self) -> TimingEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def end(self, section: Section) -> None:
        self._pending.append((section, section.event, self.mark()))
        if len(self._pending) > MAX_PENDING:
            self.read()

    def read(self) -> None:
        """Count the calls that the device has passed, without waiting for the others."""
        while self._pending and self._pending[0][2].query():
            section, start, end = self._pending.popleft()
            section.tally.add_device_call(start.elapsed_time(end) / 1000)
            self._free += (start, end)


def _event_factory(device: torch.device | None) -> Callable[[], TimingEvent] | None:
    if device is None or device.type != "cuda":
        return None
    return partial(torch.cuda.Event, enable_timing=True)


def _measure_section_cost_s(new_event: Callable[[], TimingEvent] | None) -> float:
    timers, costs = Timers(new_event=new_event), []
    work = torch.ones(512, 512, device="cpu")  # constant: training's random streams are not for measurements
    for _ in range(31):
        torch.nn.functional.mish(work @ work).softmax(-1)
        began = time.perf_counter()
        with timers("section"):
            pass
        costs.append(time.perf_counter() - began)
    return statistics.median(costs)
