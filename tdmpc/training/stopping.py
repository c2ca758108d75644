"""Signals that ask a run to stop."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the polite kill, and the warning that SLURM sends before time is up."""


class StopRequest:
    """Remember that a signal has asked the run to stop, so that it does where it can continue exactly.

    A second SIGINT does not wait: it raises KeyboardInterrupt on the spot.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Tell whether a stop is requested."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that the signal ended."""
        return 128 + self.signal if self.signal else 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the signals; what they did before comes back afterwards. Main thread only."""
        before = {number: signal.signal(number, self._request) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
