"""How much arithmetic a call does, and how much the machine can do.

Counted are matrix products (and convolutions and attention, where there are any), 2 FLOP for each multiplication
and addition, forwards and backwards, from the shapes of their operands. Everything else (norms, activations,
softmax, optimisers) counts as nothing: it is bound by memory, and time spent on it shows as a smaller share of peak.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tdmpc.benchmarks.timing import Stopwatch

PEAK_ROWS, PEAK_WIDTH = 2048, 512

Flop = Mapping[torch.dtype, int]
"""FLOP by the type of the numbers that are multiplied."""


def count_flop(call: Callable[[], Any]) -> Flop:
    """Run `call` once and return the FLOP of its products; what is compiled runs without the compiler here."""
    with torch.compiler.set_stance("force_eager"), _Products() as products:
        call()
    return products.flop


def measure_peak(dtype: torch.dtype, device: torch.device, stopwatch: Stopwatch) -> float:
    """Return the FLOP a second of a linear layer of 512 to 512 numbers on 2048 rows."""
    x = torch.randn(PEAK_ROWS, PEAK_WIDTH, device=device, dtype=dtype)
    weight = torch.randn(PEAK_WIDTH, PEAK_WIDTH, device=device, dtype=dtype)
    with torch.no_grad():
        timing = stopwatch.time(lambda: F.linear(x, weight))
    return 2 * PEAK_ROWS * PEAK_WIDTH**2 / timing.median_s


def peak_share(flop: Flop, peaks: Mapping[torch.dtype, float], seconds: float) -> float | None:
    """Return the time that the products take at the peak of their types, as a share of `seconds`.

    None where there are no products, or the peak of a type was not measured.
    """
    if not flop or not flop.keys() <= peaks.keys():
        return None
    return sum(count / peaks[dtype] for dtype, count in flop.items()) / seconds


class _Products(TorchDispatchMode):
    """Count as torch's `FlopCounterMode` does, with its formulas, but by type."""

    def __init__(self) -> None:
        super().__init__()
        self.flop: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:  # under `inference_mode`, a linear layer arrives whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            factor = next(arg for arg in reversed(args) if isinstance(arg, Tensor))
            self.flop[factor.dtype] += formula(*args, **kwargs, out_val=out)
        return out
