"""From values of single steps and updates to one row a window."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase

from tdmpc.telemetry.metrics import Reduce, declaration

Row = Mapping[str, Any]


class NonFiniteError(RuntimeError):
    """A loss or a gradient is not a finite number; the message names it."""


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Take a finished row."""
        ...

    def announce(self, text: str) -> None:
        """Say what begins now and may take long, or what a person should know."""
        ...

    def add_video(self, step: int, path: Path) -> None:
        """Take a finished video of the evaluation at `step`."""
        ...

    def advance(self, step: int, eta_s: float | None, doing: str = "") -> None:
        """Show how far the run is, and what it does between steps; called at every step, so it must cost little."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class Accumulator:
    """Reduce the values of a window to one, in constant memory."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._count, self._sum, self._max, self._last = 0, 0.0, -math.inf, 0.0

    def add(self, value: float) -> None:
        """Take one more value."""
        self._count += 1
        self._sum += value
        self._max = max(self._max, value)
        self._last = value

    def state(self) -> tuple[int, float, float, float]:
        """Return the running numbers."""
        return self._count, self._sum, self._max, self._last

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from running numbers."""
        self._count, self._sum, self._max, self._last = state

    def value(self) -> float:
        """Return the reduced value; at least one must have been added."""
        match self._reduce:
            case Reduce.MEAN:
                return self._sum / self._count
            case Reduce.SUM:
                return self._sum
            case Reduce.MAX:
                return self._max
            case Reduce.LAST:
                return self._last


class Recorder:
    """Collect values over a window and hand the row that they make to the sinks.

    A value that was not recorded in a window is absent from its row. A sink that raises is reported once, and
    training goes on.

    Args:
        sinks: where rows go.
        wall_clock: seconds since 1970.
    """

    def __init__(self, sinks: Sequence[Sink], wall_clock: Callable[[], float] = time.time) -> None:
        self._sinks, self._wall_clock = list(sinks), wall_clock
        self._failing: set[int] = set()
        self._window: dict[str, Accumulator] = {}
        self._update_sum: TensorDictBase | None = None
        self._updates = 0

    def add_sink(self, sink: Sink) -> None:
        """Hand the rows to one more sink from now on."""
        self._sinks.append(sink)

    def record(self, name: str, value: float) -> None:
        """Add one value to the window.

        Raises:
            KeyError: no such metric is declared.
        """
        if name not in self._window:
            self._window[name] = Accumulator(declaration(name).window)
        self._window[name].add(value)

    def record_update(self, metrics: TensorDictBase) -> None:
        """Add the metrics of one update; they stay on the device until the window ends."""
        self._update_sum = metrics if self._update_sum is None else self._update_sum + metrics
        self._updates += 1

    def positions(self) -> dict[str, int]:
        """Return the size of the files of the sinks that have one, by the name of the sink."""
        positions = {type(sink).__name__: getattr(sink, "position", None) for sink in self._sinks}
        return {name: position for name, position in positions.items() if position is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the window under way, so that a continued run writes the row that an unbroken one would."""
        return {
            "window": {name: accumulator.state() for name, accumulator in self._window.items()},
            "update_sum": None if self._update_sum is None else self._update_sum.cpu().to_dict(),
            "updates": self._updates,
            "positions": self.positions(),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on with a window, in which updates are measured on `device`."""
        self._window = {}
        for name, numbers in state["window"].items():
            self._window[name] = Accumulator(declaration(name).window)
            self._window[name].restore(numbers)
        self._update_sum = None if state["update_sum"] is None else TensorDict(state["update_sum"]).to(device)
        self._updates = state["updates"]

    def check_finite(self, step: int) -> None:
        """Read the losses and gradient norms of the window so far.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        for name, value in self._update_means().items():
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} in the window that ends at step {step}: training stops. The last checkpoint "
                    "is from before; a lower lr or grad_clip_norm may help"
                )

    def end_window(self, kind: str, progress: Mapping[str, float], **values: float) -> None:
        """Write a row of what was recorded since the last one, then begin a new window.

        Args:
            kind: what the row is about.
            progress: the values that stand in every row: step, frames, updates, elapsed_s.
            values: more of the row, as they are.

        Raises:
            NonFiniteError: a loss or gradient of the window is not finite; the row is written all the same.
        """
        values |= {name: accumulator.value() for name, accumulator in self._window.items()} | self._update_means()
        self.write(kind, progress, **values)
        try:
            self.check_finite(int(progress["step"]))
        finally:
            self._window = {}
            self._update_sum, self._updates = None, 0

    def write(self, kind: str, progress: Mapping[str, float], **values: float) -> None:
        """Hand a row to the sinks without ending the window."""
        for name in values:
            declaration(name)
        row = {"kind": kind, "time": self._wall_clock(), **progress, **values}
        self._each(lambda sink: sink.write(row))

    def announce(self, text: str) -> None:
        """Tell the sinks that something begins, or what a person should know."""
        self._each(lambda sink: sink.announce(text))

    def add_video(self, step: int, path: Path) -> None:
        """Tell the sinks of a finished video."""
        self._each(lambda sink: sink.add_video(step, path))

    def advance(self, step: int, eta_s: float | None, doing: str = "") -> None:
        """Tell the sinks how far the run is."""
        self._each(lambda sink: sink.advance(step, eta_s, doing))

    def close(self) -> None:
        """Close the sinks."""
        self._each(lambda sink: sink.close())

    def _update_means(self) -> dict[str, float]:
        if self._update_sum is None:
            return {}
        sums = self._update_sum.cpu().to_dict()
        return {f"train/{name}": total.item() / self._updates for name, total in sums.items()}

    def _each(self, call: Callable[[Sink], None]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                call(sink)
            except Exception as error:
                if number not in self._failing:
                    self._failing.add(number)
                    name = type(sink).__name__
                    self.announce(
                        f"warning: {name} failed ({type(error).__name__}: {error}); training goes on without it"
                    )
