"""What asks a run to stop: a signal, or the file by which a multirun asks all its jobs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, the polite kill, and the warning that SLURM sends before time is up."""


STOP_FILE = "TDMPC_STOP_FILE"
"""The environment variable that names a file which, once it exists, asks to stop, as SIGTERM does."""


class BrokenOff(BaseException):
    """A signal has asked to stop amid something that need not be ended; no `except Exception` stops it."""


class StopRequest:
    """Remember that something has asked the run to stop, so that it does where it can continue exactly.

    A second SIGINT does not wait: it raises KeyboardInterrupt on the spot.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at_once = False
        self._file = Path(os.environ[STOP_FILE]) if os.environ.get(STOP_FILE) else None

    def __call__(self) -> bool:
        """Tell whether a stop is requested."""
        if self.signal is None and self._file is not None and self._file.exists():
            self.signal = signal.SIGTERM
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

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Break off what is done in this context as soon as a signal asks to stop."""
        self._at_once = True
        try:
            yield
        except BrokenOff:
            pass
        finally:
            self._at_once = False

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
        if self._at_once:
            raise BrokenOff
