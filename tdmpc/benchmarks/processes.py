"""Training in a process of its own, watched and stopped from here."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

_TRAIN = Path(__file__).parents[2] / "scripts/train.py"
_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """What a runner needs of a process."""

    def poll(self) -> int | None:
        """Return its exit code, as a shell would report it; None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save and end."""
        ...

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        ...

    def memory_bytes(self) -> int:
        """Return the memory that it and all that it has started take now."""
        ...


class TrainProcess:
    """A process of `scripts/train.py`, which does not outlive this one.

    It has a session of its own, so that Ctrl-C reaches this process alone, which then asks it to stop.

    Args:
        arguments: of the script.
        log: file to which all that it prints is appended.
        threads: of the libraries beside torch, which has a key of its own.
    """

    def __init__(self, arguments: Sequence[str], log: Path, threads: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(_TRAIN), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
            )

    def poll(self) -> int | None:
        """Return its exit code, as a shell would report it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """Ask it to save and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def memory_bytes(self) -> int:
        """Return the memory that it and all that it has started take now, what they share counted once."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            return sum(map(_memory_bytes, [root, *root.children(recursive=True)]))
        return 0


def _memory_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        memory = process.memory_full_info()
        return getattr(memory, "pss", memory.rss)  # only Linux divides shared pages among those who share them
    return 0


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM, on which a run saves, when the parent dies, even of a SIGKILL."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
