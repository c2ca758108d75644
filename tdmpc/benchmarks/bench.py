"""What all measurements of a suite share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tdmpc.benchmarks.flops import Flop, measure_peak, peak_share
from tdmpc.benchmarks.results import Record
from tdmpc.benchmarks.timing import Stopwatch, Timing
from tdmpc.config import BenchmarkConfig

PEAK_PRECISIONS = (torch.float32, torch.bfloat16)
NO_PRODUCTS: Flop = {}


@dataclass(frozen=True)
class Bench:
    """Measures, on one device, and makes records of it.

    Attributes:
        config: what is measured.
        device: where the agent computes.
        stopwatch: times calls.
        peaks: FLOP a second that the device reaches, by precision.
        folder: empty, for files that go when the suite ends.
    """

    config: BenchmarkConfig
    device: torch.device
    stopwatch: Stopwatch
    peaks: dict[torch.dtype, float]
    folder: Path

    @classmethod
    def set_up(cls, config: BenchmarkConfig, device: torch.device, folder: Path) -> "Bench":
        """Measure the peaks of a device."""
        wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        stopwatch = Stopwatch(config.repeats, config.budget_s, synchronize=wait)
        peaks = {dtype: measure_peak(dtype, device, stopwatch) for dtype in PEAK_PRECISIONS}
        return cls(config, device, stopwatch, peaks, folder)

    @property
    def gflops_per_s(self) -> dict[str, float]:
        """The peaks by the name of the precision, in 10^9 FLOP a second."""
        return {_name(dtype): peak / 1e9 for dtype, peak in self.peaks.items()}

    def record(self, name: str, timing: Timing, flop: Flop = NO_PRODUCTS, **more: Any) -> Record:
        """Make a record; `more` are its fields besides the times and what follows from `flop`."""
        gflop = sum(flop.values()) / 1e9 if flop else None
        precisions = sorted(flop, key=lambda dtype: -flop[dtype])
        return Record(
            name=name,
            median_s=timing.median_s,
            min_s=timing.min_s,
            p90_s=timing.p90_s,
            first_s=timing.first_s,
            repeats=timing.repeats,
            gflop=gflop,
            precision=", ".join(map(_name, precisions)) or None,
            gflops_per_s=gflop and gflop / timing.median_s,
            peak_share=peak_share(flop, self.peaks, timing.median_s),
            **more,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
