"""Building blocks of the networks (TD-MPC2, arXiv 2310.16828, section 3.1 and appendix H)."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Mish(torch.autograd.Function):
    """Mish from one exponential: `x tanh(ln(1 + e^x)) = x - 2x / ((1 + e^x)^2 + 1)`.

    `F.mish` is the largest part of a plan and an update on a CPU; this is 2 to 4 times faster.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # Where the exponential overflows the fraction is 0, as it should be.
        return torch.addcdiv(x, x, x.exp().add_(1).square_().add_(1), value=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Above 20 the slope is 1 to the last bit; unclamped, its fraction would be infinite over infinite.
        exp = x.clamp(max=20).exp_()
        one_plus = exp + 1
        inverse = one_plus.square().add_(1).reciprocal_()
        slope = exp.mul_(one_plus).mul_(inverse).mul_(x).mul_(4).sub_(2).mul_(inverse).add_(1)
        return slope.mul_(grads[0])


def mish(x: Tensor) -> Tensor:
    """Return the activation `x tanh(softplus(x))` of `x`, any shape."""
    return cast(Tensor, _Mish.apply(x))


class Mish(nn.Module):
    """`mish` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply `mish` to every element."""
        return mish(x)


class _Affine(torch.autograd.Function):
    """`x * weight + bias`, whose gradients are summed over rows by a matrix product.

    A compiler that fuses these sums with the row-wise gradient of the LayerNorm before it walks along columns, several
    times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addcmul(bias.unsqueeze(1), x, weight.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return grad * weight.unsqueeze(1), _sum_rows(grad * x), _sum_rows(grad)


class _Add(torch.autograd.Function):
    """`x + bias`, with the gradient of the bias as in `_Affine`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], _sum_rows(grads[0])


def _sum_rows(x: Tensor) -> Tensor:
    """Return the sums `[Q, N]` over the rows of `x [Q, M, N]`."""
    # Of two rows, for the compiler turns a product with one back into a sum.
    return torch.bmm(x.new_ones(x.shape[0], 2, x.shape[1]), x)[:, 0]


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return `x * weight + bias` for `x [Q, ..., N]` and `weight`, `bias [Q, N]`."""
    return cast(Tensor, _Affine.apply(x.flatten(1, -2), weight, bias)).view(x.shape)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return `x + bias`, in float32, for `x [Q, ..., N]` and `bias [Q, N]`."""
    return cast(Tensor, _Add.apply(x.flatten(1, -2).float(), bias)).view(x.shape)


class SimNorm(nn.Module):
    """Project a vector onto simplices: a softmax within each of its groups.

    Feature `j` of group `i` lies at position `j * (D / group_size) + i`. Groups of neighbours, as in the
    published code, are the same function of renamed features; laid out at a stride, the softmax runs along
    contiguous memory, which is an order of magnitude faster on a CPU. `official.py` does the renaming.

    Args:
        group_size: features per simplex, 8 in the paper.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., D]` to the same shape, every group summing to 1."""
        return x.unflatten(-1, (self.group_size, -1)).softmax(-2).flatten(-2)


class Linear(nn.Linear):
    """Linear layer whose output is float32, whatever precision autocast gives its product."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `input [..., in]`."""
        product = F.linear(input, self.weight).unsqueeze(0)
        return add_bias(product, self.bias.unsqueeze(0)).squeeze(0)


class NormedLinear(Linear):
    """Linear layer, LayerNorm, activation: `[..., in] -> [..., out]`."""

    def __init__(self, in_features: int, out_features: int, activation: nn.Module | None = None) -> None:
        super().__init__(in_features, out_features)
        self.ln = nn.LayerNorm(out_features)
        self.activation = activation or Mish()

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to `input [..., in]`."""
        h = F.layer_norm(super().forward(input), self.ln.normalized_shape).unsqueeze(0)
        return self.activation(affine(h, self.ln.weight.unsqueeze(0), self.ln.bias.unsqueeze(0)).squeeze(0))


def mlp(
    in_features: int, hidden: Sequence[int], out_features: int, activation: nn.Module | None = None
) -> nn.Sequential:
    """Stack `NormedLinear` layers; the last layer is plain linear, or normed when given an activation."""
    sizes = [in_features, *hidden]
    layers: list[nn.Module] = [NormedLinear(i, o) for i, o in itertools.pairwise(sizes)]
    last = NormedLinear(sizes[-1], out_features, activation) if activation else Linear(sizes[-1], out_features)
    return nn.Sequential(*layers, last)


class StackedLayer(NamedTuple):
    """The same layer of several networks: `weight [Q, out, in]`, the others `[Q, out]`; no norm: plain linear.

    The product is made in the precision of `weight`; everything else in float32.
    """

    weight: Tensor
    bias: Tensor
    ln_weight: Tensor | None
    ln_bias: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "StackedLayer":
        """Return the layer with every tensor replaced by its image."""
        norm = [None if t is None else function(t) for t in (self.ln_weight, self.ln_bias)]
        return StackedLayer(function(self.weight), function(self.bias), *norm)

    def rounded(self, dtype: torch.dtype) -> "StackedLayer":
        """Return the layer for products of another precision."""
        return self._replace(weight=self.weight.to(dtype))

    def product(self, x: Tensor) -> Tensor:
        """Return the linear part for `x [M, in]`, shared by the networks, or `[Q, M, in]`: `[Q, M, out]`."""
        x = x.to(self.weight.dtype).expand(self.weight.shape[0], *x.shape[-2:])
        return add_bias(torch.bmm(x, self.weight.mT), self.bias)

    def activate(self, h: Tensor, activation: Callable[[Tensor], Tensor] = mish) -> Tensor:
        """Return activation(LayerNorm(h)) for `h [Q, ..., out]`, in float32."""
        assert self.ln_weight is not None
        assert self.ln_bias is not None
        return activation(affine(F.layer_norm(h, h.shape[-1:]), self.ln_weight, self.ln_bias))


def stack_layers(layers: Sequence[nn.Module]) -> StackedLayer:
    """Stack layers of equal shape, one of each network, so that one batched product serves all of them."""
    linears = [cast(nn.Linear, layer) for layer in layers]
    norms = [layer.ln for layer in layers if isinstance(layer, NormedLinear)]
    return StackedLayer(
        torch.stack([layer.weight for layer in linears]),
        torch.stack([layer.bias for layer in linears]),
        torch.stack([ln.weight for ln in norms]) if norms else None,
        torch.stack([ln.bias for ln in norms]) if norms else None,
    )


def stack_networks(networks: Sequence[Iterable[nn.Module]], dtype: torch.dtype) -> list[StackedLayer]:
    """Stack networks of equal shape layer by layer, for products of the given precision."""
    return [stack_layers(layers).rounded(dtype) for layers in zip(*networks, strict=True)]


def run_stacked(layers: Sequence[StackedLayer], x: Tensor, drop: Tensor | None = None) -> Tensor:
    """Run stacked networks on `x [M, in]`, giving `[Q, M, out]` in float32.

    Args:
        layers: hidden layers (normed, Mish) and a plain last layer.
        x: input, shared by all networks.
        drop: dropout factors of the first layer, 0 or 1/(1-p), `[Q, M, hidden]`; none: no dropout.
    """
    *hidden, last = layers
    for i, layer in enumerate(hidden):
        h = layer.product(x)
        if i == 0 and drop is not None:
            h = h * drop
        x = layer.activate(h)
    return last.product(x)


class _Norm(nn.Module):
    """Affine LayerNorm parameters of every head; named so that keys end as those of `NormedLinear`."""

    def __init__(self, num_heads: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, features))
        self.bias = nn.Parameter(torch.zeros(num_heads, features))


class _EnsembleLayer(nn.Module):
    def __init__(self, num_heads: int, in_features: int, out_features: int, normed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_heads, out_features))
        self.ln = _Norm(num_heads, out_features) if normed else None

    def stacked(self, heads: Tensor | None) -> StackedLayer:
        norm = (None, None) if self.ln is None else (self.ln.weight, self.ln.bias)
        layer = StackedLayer(self.weight, self.bias, *norm)
        return layer if heads is None else layer.map(lambda tensor: tensor[heads])


class Ensemble(nn.ModuleList):
    """`num_heads` independent copies of `mlp(in_features, hidden, out_features)` with stacked weights."""

    def __init__(self, num_heads: int, in_features: int, hidden: Sequence[int], out_features: int) -> None:
        sizes = [in_features, *hidden, out_features]
        last = len(sizes) - 2
        super().__init__(_EnsembleLayer(num_heads, sizes[i], sizes[i + 1], normed=i < last) for i in range(last + 1))

    def layers(self, heads: Tensor | None = None) -> list[StackedLayer]:
        """Return the layers of all heads, or of the given ones, `heads [n]` int64, for `run_stacked`."""
        return [layer.stacked(heads) for layer in self]  # pyright: ignore[reportCallIssue]


def draw_heads(num_heads: int, *draws: int, generator: torch.Generator) -> Tensor:
    """Draw two different heads, uniformly, `draws` times: int64 `[*draws, 2]`, on the generator's device."""
    scores = torch.rand(*draws, num_heads, generator=generator, device=generator.device)
    return scores.topk(min(2, num_heads), dim=-1).indices
