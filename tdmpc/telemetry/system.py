"""What the run takes of the machine."""

import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import torch


class SystemMetrics:
    """Measure memory and CPU use of this process and its children, such as those that step environments.

    Args:
        device: whose memory to measure besides.
        replay_bytes: returns the bytes reserved for the replay.
        clock: seconds, monotonic.
    """

    def __init__(
        self, device: torch.device, replay_bytes: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device, self._replay_bytes, self._clock = device, replay_bytes, clock
        self._process = psutil.Process()
        self._since, (_, self._cpu_s) = clock(), self._usage()

    def __call__(self) -> dict[str, float]:
        """Return the `system/*` metrics of a row; CPU use is since the last call."""
        rss_bytes, cpu_s = self._usage()
        now = self._clock()
        metrics: dict[str, float] = {"system/rss_bytes": rss_bytes, "system/replay_bytes": self._replay_bytes()}
        if now > self._since:
            # A child that has ended takes its seconds with it.
            metrics["system/cpu_percent"] = max(0.0, 100 * (cpu_s - self._cpu_s) / (now - self._since))
        if self._device.type == "cuda":
            metrics["system/gpu_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        self._since, self._cpu_s = now, cpu_s
        return metrics

    def _usage(self) -> tuple[int, float]:
        """Return the resident bytes and the CPU seconds so far of all processes."""
        rss_bytes, cpu_s = 0, 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                rss_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_s += times.user + times.system
        return rss_bytes, cpu_s
