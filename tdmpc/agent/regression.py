"""Scalars predicted as distributions over bins in symlog space (TD-MPC2, section 3.2; DreamerV3)."""

import torch
from torch import Tensor, nn


def symlog(x: Tensor) -> Tensor:
    """Return `sign(x) ln(1 + |x|)`."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Return the inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


class TwoHot(nn.Module):
    """Code scalars as two-hot distributions over bins that are evenly spaced in symlog space.

    Args:
        num_bins: number of bins K, at least 2.
        vmin: lowest bin, in symlog space.
        vmax: highest bin, in symlog space.
    """

    bins: Tensor

    def __init__(self, num_bins: int, vmin: float, vmax: float) -> None:
        super().__init__()
        self.num_bins, self.vmin, self.vmax = num_bins, vmin, vmax
        self.bin_size = (vmax - vmin) / (num_bins - 1)
        self.register_buffer("bins", torch.linspace(vmin, vmax, num_bins), persistent=False)

    def _locate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower neighbouring bin (int64) and the weight of the upper one."""
        position = (symlog(x).clamp(self.vmin, self.vmax) - self.vmin) / self.bin_size
        # The highest value belongs to the last pair of bins: its upper neighbour must exist.
        # What is not a number has no bin, but must come out as a loss that is none, and not as a place out of bounds.
        lower = position.nan_to_num(0.0).floor().clamp(0, self.num_bins - 2)
        return lower.long(), position - lower

    def decode(self, logits: Tensor) -> Tensor:
        """Return the scalars `[..., 1]` that the distributions with these `logits [..., K]` stand for."""
        # Not a matrix product: that would follow autocast to another precision, and no compiler would fuse it.
        return symexp((logits.softmax(-1) * self.bins).sum(-1, keepdim=True))

    def cross_entropy(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return the cross-entropy `[..., 1]` of `logits [..., K]` against the scalars `x [..., 1]`.

        The leading shape of `x` broadcasts to that of `logits` (several heads, one target). Only the two bins
        that carry weight are read: the product with all K would be mostly zeros.
        """
        lower, upper_weight = self._locate(x)
        lower = lower.expand(*logits.shape[:-1], 1)
        log_probs = logits.log_softmax(-1)
        return -(1 - upper_weight) * log_probs.gather(-1, lower) - upper_weight * log_probs.gather(-1, lower + 1)
