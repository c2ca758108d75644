"""What the run takes of the machine."""

from collections.abc import Callable

import psutil
import torch


class SystemMetrics:
    """Measure memory and CPU use of this process and its children.

    Args:
        device: whose memory to measure besides.
        replay_bytes: returns the bytes that the rows in the replay take.
    """

    def __init__(self, device: torch.device, replay_bytes: Callable[[], int]) -> None:
        self._device, self._replay_bytes = device, replay_bytes
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only begins the interval that the next one measures

    def __call__(self) -> dict[str, float]:
        """Return the `system/*` metrics of a row; CPU use is since the last call."""
        metrics: dict[str, float] = {
            "system/rss_bytes": self._process.memory_info().rss,
            "system/cpu_percent": self._process.cpu_percent(),
            "system/replay_bytes": self._replay_bytes(),
        }
        if self._device.type == "cuda":
            metrics["system/gpu_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return metrics
