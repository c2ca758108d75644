"""Environments in child processes: how these start, how their death is noticed, how they end."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import connection, resource_tracker
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from envs.errors import EnvironmentCrash
from envs.slot import Slot

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_DEATH_CERTIFICATE_S = 5.0  # from the broken pipe of a process to its exit code


class Children:
    """One process per environment. They work at the same time, between `send` and `receive`."""

    def __init__(self, slots: Sequence[Callable[[], Slot]]) -> None:
        with _spawning():
            try:
                self._envs = AsyncVectorEnv(slots, context="spawn", autoreset_mode=AutoresetMode.DISABLED)
            except (EOFError, OSError) as error:
                raise EnvironmentCrash("the process of an environment ended while it started") from error
        self._pipes = list(self._envs.parent_pipes)
        self._processes = self._envs.processes
        self._numbers = {process.sentinel: number for number, process in enumerate(self._processes)}
        self._poller = select.poll()
        for sentinel in self._numbers:
            self._poller.register(sentinel, select.POLLIN)

    def reset(self, mask: np.ndarray, seeds: list[int | None]) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes where `mask` `[E]` is set; return observations `[E, O]` and info."""
        self._alive(partial(self._envs.reset_async, seeds, {"reset_mask": mask}))
        self._wait()
        return self._alive(self._envs.reset_wait)

    def send(self, action: np.ndarray) -> None:
        """Let every environment take its action `[E, A]`."""
        self._alive(partial(self._envs.step_async, action))

    def receive(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Wait for the steps; return observations `[E, O]`, rewards `[E]` and info."""
        self._wait()
        obs, reward, _, _, info = self._alive(self._envs.step_wait)
        return obs, reward, info

    def check_alive(self) -> None:
        """Raise if a process has died."""
        if any(ready in self._numbers for ready, _ in self._poller.poll(0)):
            raise self._death()

    def close(self, patience_s: float) -> None:
        """Let the processes close their environments; kill those that need longer than `patience_s`."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._envs.closed = True  # or its finaliser would try to talk to them

    def _wait(self) -> None:
        """Wait until every process has answered, or one has died.

        Reading the answers in turn, as `AsyncVectorEnv` does, would notice a death only after all slower
        answers before it.
        """
        for pipe in self._pipes:
            self._poller.register(pipe, select.POLLIN)
        pending = len(self._pipes)
        while pending:
            for ready, _ in self._poller.poll():
                if ready in self._numbers:
                    raise self._death()
                self._poller.unregister(ready)
                pending -= 1

    def _alive(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> EnvironmentCrash:
        ended = connection.wait(list(self._numbers), _DEATH_CERTIFICATE_S)
        if not ended:
            return EnvironmentCrash("the process of an environment closed its pipe, but has not ended")
        number = next(number for sentinel, number in self._numbers.items() if sentinel in ended)
        self._processes[number].join()
        return EnvironmentCrash(f"environment {number}: its process {_cause(self._processes[number].exitcode)}")


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name} (exit code {exitcode})"
    return f"ended with exit code {exitcode}"


@contextlib.contextmanager
def _spawning() -> Iterator[None]:
    """Set what a child inherits at its start: no signals that ask to stop, one thread, no main module.

    - A blocked signal stays blocked in a child for good: Ctrl-C in a terminal and the signals of SLURM go to all
      processes, and it is the parent that decides. Here they are only delayed.
    - Environments run side by side: more threads in each would only compete.
    - `multiprocessing` runs the main module again in every child. A trainer's imports torch: seconds and hundreds
      of megabytes for each environment, which needs nothing of it.
    """
    main, environ = sys.modules["__main__"], os.environ.copy()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    resource_tracker.ensure_running()  # the first child would start it, and its start unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name in _ONE_THREAD.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
