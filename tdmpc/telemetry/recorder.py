"""From values of single steps and updates to one row a window."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase

Row = Mapping[str, Any]


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Take a finished row."""
        ...

    def announce(self, text: str) -> None:
        """Say what begins now and may take long, or what a person should know."""
        ...

    def advance(self, step: int) -> None:
        """Show that the run has reached `step`; called at every step, so it must cost next to nothing."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class Recorder:
    """Collect values over a window and hand their means to the sinks as a row.

    A value that was not recorded in a window is absent from its row.

    Args:
        sinks: where rows go.
        clock: seconds, monotonic.
    """

    def __init__(self, sinks: Sequence[Sink], clock: Callable[[], float] = time.monotonic) -> None:
        self._sinks, self._clock = list(sinks), clock
        self._start = clock()
        self._values: dict[str, list[float]] = defaultdict(list)
        self._update_sum: TensorDictBase | None = None
        self._updates = 0

    def add_sink(self, sink: Sink) -> None:
        """Hand the rows to one more sink from now on."""
        self._sinks.append(sink)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def record(self, name: str, value: float) -> None:
        """Add one value to the window."""
        self._values[name].append(value)

    def record_update(self, metrics: TensorDictBase) -> None:
        """Add the metrics of one update; they stay on the device until the window ends."""
        self._update_sum = metrics if self._update_sum is None else self._update_sum + metrics
        self._updates += 1

    def log(self, kind: str, step: int, **values: float) -> None:
        """End the window: write a row of the means of what was recorded, and of `values` as they are."""
        row: dict[str, Any] = {"kind": kind, "step": step, "elapsed_s": self.elapsed_s, **values}
        row |= {name: sum(items) / len(items) for name, items in self._values.items()}
        if self._update_sum is not None:
            sums = self._update_sum.cpu().to_dict()
            row |= {f"train/{name}": value.item() / self._updates for name, value in sums.items()}
        self._values.clear()
        self._update_sum, self._updates = None, 0
        self.write(row)

    def write(self, row: Row) -> None:
        """Hand a row to the sinks without ending the window."""
        for sink in self._sinks:
            sink.write(row)

    def announce(self, text: str) -> None:
        """Tell the sinks that something begins, or what a person should know."""
        for sink in self._sinks:
            sink.announce(text)

    def advance(self, step: int) -> None:
        """Tell the sinks how far the run is."""
        for sink in self._sinks:
            sink.advance(step)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            sink.close()
