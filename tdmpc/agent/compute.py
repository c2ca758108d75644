"""How the agent computes: precision of its products, and compilation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MAX_SHAPES = 64
"""Shapes of arguments for which one process compiles the same function; PyTorch's own limit, 8, is soon reached."""


@dataclass(frozen=True)
class Compute:
    """Precision of products, and whether whole functions are compiled; LayerNorm, losses and weights are float32.

    Attributes:
        plan_dtype: of the products in planning, float32 or bfloat16.
        update_dtype: of the products in updating.
        compile: whether plans and losses are compiled.
        mode: of `torch.compile`; None: its default.
    """

    plan_dtype: torch.dtype = torch.float32
    update_dtype: torch.dtype = torch.float32
    compile: bool = False
    mode: str | None = None

    def compiled(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is compiled as a whole at the first call with each shape of arguments."""
        if not self.compile:
            return function
        torch._dynamo.config.recompile_limit = MAX_SHAPES
        return torch.compile(function, fullgraph=True, dynamic=False, mode=self.mode)


EAGER = Compute()
"""Nothing compiled, all float32: the reference that the others approximate."""


def has_fast_bf16(device: torch.device) -> bool:
    """Tell whether products in bfloat16 are faster than in float32 on a device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Without these instructions a product in bfloat16 is emulated, and slower.
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
