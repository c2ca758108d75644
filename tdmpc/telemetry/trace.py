"""A trace of a few updates by torch's own profiler, for `chrome://tracing` or Perfetto."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """Profile what happens between one update and another.

    Args:
        path: the Chrome trace to write.
        at: update at which it begins.
        updates: how many updates it covers, with the acting and stepping between them.
        announce: told the file and the operators that took longest.
    """

    def __init__(self, path: Path, at: int, updates: int, announce: Callable[[str], None]) -> None:
        self._path, self._announce = path, announce
        self._begin, self._end = at, at + updates
        self._profile: profile | None = None

    def __call__(self, update: int) -> None:
        """Begin or end where the number of updates done says so; to be called before every update."""
        if self._profile is None and self._begin <= update < self._end:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif self._profile is not None and update >= self._end:
            self.close()

    def close(self) -> None:
        """Write the trace if one is under way; with fewer updates than asked for where the run ends before."""
        if self._profile is None:
            return
        finished, self._profile, self._begin = self._profile, None, self._end
        try:
            finished.stop()
            finished.export_chrome_trace(str(self._path))
            self._announce(f"{_top_operators(finished)}\ntrace: {self._path}")
        except (OSError, RuntimeError) as error:  # as where the disk is full
            self._announce(f"warning: no trace {self._path}: {error}")


def _top_operators(finished: profile) -> str:
    """Return the operators that took longest as a table, by the device's time where one was used."""
    operators = finished.key_averages()
    used = any(operator.self_device_time_total > 0 for operator in operators)
    sort = "self_device_time_total" if used else "self_cpu_time_total"
    return operators.table(sort_by=sort, row_limit=12, max_name_column_width=50)


def no_trace(update: int) -> None:
    """Profile nothing."""
