"""What becomes of a worker's weights when it meets its peers: arithmetic on flat state dicts, name to tensor.

Workers that merge the same states get the same bits, whatever their processors and numbers of threads. That is why
products and sums are separate operations throughout: a fused one rounds once where two round twice, and whether a
kernel fuses depends on the processor and on where its threads split a tensor.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""A flat state dict."""

Layout = dict[str, str]
"""Type and shape of every tensor of a state by its name, in words."""

_SMALLEST_EXPONENT = -700.0  # exp of less than -745 is 0, and a message of no weight has no mean


def layout_of(state: State) -> Layout:
    """Describe what a state consists of."""
    return {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in state.items()}


def difference(layout: Layout, expected: Layout) -> str | None:
    """Return the first thing that differs in a layout, None where nothing does."""
    for name in sorted(layout.keys() | expected.keys()):
        found, wanted = layout.get(name, "missing"), expected.get(name, "missing")
        if found != wanted:
            return f"{name} is {found}, not {wanted}"
    return None


class RunningMean:
    """The weighted mean of states that come one at a time, so that one of them and the mean are all that is in memory.

    Floating tensors are averaged in float32, those of float64 in float64, and come out in their own type. Of whole
    numbers and truth values, which have no mean, it takes the largest, element by element.

    The mean moves towards each state by that state's share of the weight so far (West, "Updating mean and variance
    estimates", 1979). So it is always a mean of what was added, and that of equal states is exactly that state.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._layout: Layout = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, state: State, weight: float) -> None:
        """Add a state, which is neither changed nor kept.

        Args:
            state: of the names, shapes and types of the first one.
            weight: above 0 and finite; the weights need not sum to 1.

        Raises:
            ValueError: it is another kind of state or weight; the mean is as it was.
        """
        if not 0 < weight < math.inf:
            raise ValueError(f"a weight must be above 0 and finite, not {weight}")
        if not self._layout:
            return self._begin(state, weight)
        if differing := difference(layout_of(state), self._layout):
            raise ValueError(f"states of different kinds have no mean: {differing}")
        self._weight += weight
        share = weight / self._weight
        for name, mean in self._mean.items():
            if mean.is_floating_point():
                mean.add_(torch.sub(state[name].to(mean), mean).mul_(share))
            else:
                torch.maximum(mean, state[name].to(mean), out=mean)

    def result(self) -> dict[str, Tensor]:
        """Return the mean in new tensors, on the device of the first state.

        Raises:
            ValueError: nothing was added.
        """
        if not self._layout:
            raise ValueError("nothing has no mean")
        return {name: mean.to(self._dtypes[name], copy=True) for name, mean in self._mean.items()}

    def _begin(self, state: State, weight: float) -> None:
        self._weight, self._layout = weight, layout_of(state)
        self._dtypes = {name: tensor.dtype for name, tensor in state.items()}
        self._mean = {name: tensor.detach().to(_precision(tensor), copy=True) for name, tensor in state.items()}


class Strategy(Protocol):
    """How a worker weighs the messages of a round, and what it makes of its own state and their mean."""

    def weights(self, returns: Sequence[float | None]) -> list[float]:
        """Return the weight of every message, above 0, from the recent returns of their workers."""
        ...

    def begin(self, own: State) -> None:
        """Remember what is needed of the weights from which training starts."""
        ...

    def step(self, own: State, mean: State) -> dict[str, Tensor]:
        """Return the state to continue with, in the types of `own`, on any device; neither argument is changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what continues the strategy: tensors, which nobody changes afterwards, and plain types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class Mean:
    """Every worker continues with the mean of all (McMahan et al., arXiv 1602.05629; Wortsman et al., 2203.05482)."""

    def weights(self, returns: Sequence[float | None]) -> list[float]:
        """Return equal weights."""
        return [1.0] * len(returns)

    def begin(self, own: State) -> None:
        """Do nothing: the mean depends on no past."""

    def step(self, own: State, mean: State) -> dict[str, Tensor]:
        """Return the mean."""
        return dict(mean)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class Weighted(Mean):
    """The mean in which workers with higher recent returns count more.

    Args:
        temperature: standard deviations of return that make a factor of e in weight, above 0; the lower, the more
            the best worker counts.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def weights(self, returns: Sequence[float | None]) -> list[float]:
        """Return the weights; see `softmax_weights`."""
        return softmax_weights(returns, self.temperature)


class Elastic(Mean):
    """Every worker is pulled towards the mean and keeps part of its own way.

    (Zhang et al., arXiv 1412.6651, without a separate centre; Jolicoeur-Martineau et al., arXiv 2304.03094.)
    Each round shrinks the distances between workers to `1 - alpha` of what they were, so they stay different on
    purpose: a run with this strategy ends with as many models as it has workers, not with one.

    Args:
        alpha: share of the way to the mean, above 0 and at most 1, where it would be the mean itself.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = alpha

    def step(self, own: State, mean: State) -> dict[str, Tensor]:
        """Return the own state pulled towards the mean; see `pull`."""
        return pull(own, mean, self.alpha)


class Nesterov(Mean):
    """The outer optimiser of DiLoCo for what is trained, the mean for all else.

    (Douillard et al., arXiv 2311.08105, algorithm 1, with the outer optimiser that they found best.)
    What the workers did since the last common point counts as one gradient, the point minus their mean. A target
    network, a running scale or moments of an optimiser follow the parameters in their own way, and extrapolating
    them could turn a variance negative: they take the mean.

    The point and the momentum are the same on every worker that took part in the same rounds since `begin`; one
    that missed a round has others, and stays apart from its peers by that much. Workers that begin with different
    weights have no common point; to them, for want of a `begin`, the first mean is it.

    Args:
        trained: says by its name whether a tensor is a parameter that an optimiser trains.
        lr: outer learning rate.
        momentum: outer momentum.
    """

    def __init__(self, trained: Callable[[str], bool], lr: float = 0.7, momentum: float = 0.9) -> None:
        self.trained, self.lr, self.momentum = trained, lr, momentum
        self._point: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self, own: State) -> None:
        """Take the weights from which training starts as the first common point; copies, on the CPU."""
        self._point = {
            name: tensor.detach().to("cpu", _precision(tensor), copy=True)
            for name, tensor in own.items()
            if self.trained(name)
        }
        self._velocity = {name: torch.zeros_like(point) for name, point in self._point.items()}

    @torch.no_grad()
    def step(self, own: State, mean: State) -> dict[str, Tensor]:
        """Return the next common point, and the mean of what isn't trained; the own state plays no part."""
        merged = dict(mean)
        if not self._point:
            self.begin(mean)
            return merged
        for name, point in self._point.items():
            gradient = point - mean[name].to(point)
            self._point[name], self._velocity[name] = nesterov(
                point, self._velocity[name], gradient, self.lr, self.momentum
            )
            merged[name] = self._point[name].to(mean[name].dtype, copy=True)
        return merged

    def state_dict(self) -> dict[str, Any]:
        """Return the last common point and the momentum."""
        return {"point": dict(self._point), "velocity": dict(self._velocity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the last common point and the momentum of then."""
        self._point, self._velocity = dict(state["point"]), dict(state["velocity"])


def softmax_weights(returns: Sequence[float | None], temperature: float) -> list[float]:
    """Return a softmax of standardised returns, not normalised.

    A return that is missing or not finite counts as average. Where all are equal, so are the weights.

    Args:
        returns: recent return of every worker.
        temperature: divides the standardised returns, above 0.
    """
    # Exact fractions: no order of workers and no huge return makes a difference.
    known = [value for value in returns if value is not None and math.isfinite(value)]
    spread = statistics.pstdev(known) if known else 0.0
    if spread == 0:
        return [1.0] * len(returns)
    centre = statistics.mean(known)
    counted = [value if value is not None and math.isfinite(value) else centre for value in returns]
    scores = [(value - centre) / spread / temperature for value in counted]
    best = max(scores)
    return [math.exp(max(score - best, _SMALLEST_EXPONENT)) for score in scores]


@torch.no_grad()
def pull(own: State, mean: State, alpha: float) -> dict[str, Tensor]:
    """Return `own + alpha (mean - own)` on the devices of `own`; what isn't floating is that of the mean."""
    pulled = {}
    for name, tensor in own.items():
        precise = tensor.detach().to(_precision(tensor))
        target = mean[name].to(precise)
        if tensor.is_floating_point():
            target = torch.sub(target, precise).mul_(alpha).add_(precise)
        pulled[name] = target.to(tensor.dtype)
    return pulled


def nesterov(point: Tensor, velocity: Tensor, gradient: Tensor, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """Take a step of gradient descent with Nesterov's momentum, as `torch.optim.SGD(nesterov=True)` does.

    (Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.)

    Returns:
        The next point and the next velocity, all of one shape.
    """
    velocity = velocity * momentum + gradient
    return point - (velocity * momentum + gradient) * lr, velocity


@torch.no_grad()
def copy_into(live: State, merged: State) -> None:
    """Copy a state into live tensors, which stay the objects they are, of their types and on their devices.

    Raises:
        ValueError: the names or shapes differ; nothing was copied.
    """
    shapes, given = ({name: list(t.shape) for name, t in state.items()} for state in (live, merged))
    if shapes != given:
        name = min(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"{name} is of shape {given.get(name)}, not {shapes.get(name)}")
    for name, tensor in live.items():
        tensor.copy_(merged[name])


@torch.no_grad()
def distance(own: State, merged: State) -> float:
    """Return how far merging moves the floating tensors: `||merged - own|| / ||own||`, over all of them together.

    It is infinite where something other than zero is made of zeros.
    """
    names = [name for name, tensor in own.items() if tensor.is_floating_point()]
    moved = _norm(merged[name].to(own[name].device) - own[name] for name in names)
    length = _norm(own[name] for name in names)
    if length == 0:
        return math.inf if moved else 0.0
    return moved / length


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


def _precision(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor is averaged."""
    return torch.float32 if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor.dtype
