"""How far a suite of runs is, on the terminal."""

import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from tdmpc.telemetry.console import duration

ASSUMED_WALL_PER_CHARGED = 1.5  # before anything was measured: compiling and evaluating take about half as long


class SuiteBar:
    """A bar over the charged seconds of all runs, with an ETA, and lines above it.

    Args:
        total_s: seconds that all runs together are charged.
        done_s: of them, what was done before.
        stream: where to print; without a terminal there are only lines.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_s: float,
        done_s: float,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_s, self._at_start_s, self._now_s = total_s, done_s, done_s
        self._stream, self._clock, self._began = stream, clock, clock()
        tqdm.monitor_interval = 0  # its thread would be one more while processes are started
        self._bar = tqdm(
            total=total_s / 60,
            initial=done_s / 60,
            file=stream,
            bar_format="{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} min{postfix}",
            disable=not stream.isatty(),
            leave=False,
            dynamic_ncols=True,
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def advance(self, charged_s: float, run: str = "") -> None:
        """Show how much all runs have been charged so far, and which is under way."""
        self._now_s = charged_s
        self._bar.set_postfix_str(f"ETA {duration(self.eta_s)}{f', {run}' if run else ''}", refresh=False)
        self._bar.update(charged_s / 60 - self._bar.n)
        self._bar.refresh()

    @property
    def eta_s(self) -> float:
        """Seconds to the end, at the pace since the start; by an assumption before anything is known."""
        charged = self._now_s - self._at_start_s
        pace = (self._clock() - self._began) / charged if charged > 0 else ASSUMED_WALL_PER_CHARGED
        return (self._total_s - self._now_s) * pace

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()
