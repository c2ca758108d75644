"""What the agent needs to know, in three parts; the defaults live in `tdmpc/config.py`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

Section = Callable[[str], AbstractContextManager[Any]]
"""Brackets a named part of the work, `with section("plan"): ...`."""


def no_section(name: str) -> AbstractContextManager[None]:
    """Bracket nothing."""
    return nullcontext()


@dataclass(frozen=True)
class NetworkSettings:
    """Sizes of the networks; stored with every checkpoint."""

    observation_size: int
    action_size: int
    episodic: bool
    enc_dim: int
    num_enc_layers: int
    mlp_dim: int
    latent_dim: int
    num_q: int
    num_bins: int
    vmin: float
    vmax: float
    simnorm_dim: int
    log_std_min: float
    log_std_max: float


@dataclass(frozen=True)
class PlannerSettings:
    """Search of the planner (TD-MPC2, section 3.3)."""

    mpc: bool
    plan_every: int
    horizon: int
    iterations: int
    num_samples: int
    num_elites: int
    num_pi_trajs: int
    min_std: float
    max_std: float
    temperature: float


@dataclass(frozen=True)
class LearnerSettings:
    """Losses and optimisers (TD-MPC2, section 3.2)."""

    horizon: int
    rho: float
    consistency_coef: float
    reward_coef: float
    value_coef: float
    termination_coef: float
    entropy_coef: float
    lr: float
    enc_lr_scale: float
    grad_clip_norm: float
    tau: float
    dropout: float


def pick(settings: type[T], source: object, **given: Any) -> T:
    """Make `settings` from the attributes of the same names of `source`, and from what is given here."""
    assert is_dataclass(settings)
    names = [field.name for field in fields(settings) if field.name not in given]
    return settings(**{name: getattr(source, name) for name in names}, **given)


def discount_factor(episode_length: int, denom: float, minimum: float, maximum: float) -> float:
    """Return gamma for episodes of `episode_length` steps (TD-MPC2, appendix H).

    The effective horizon is a fixed part of the episode, `f = episode_length / denom`; gamma = (f-1)/f,
    clipped to `[minimum, maximum]`.
    """
    fraction = episode_length / denom
    return min(max((fraction - 1) / fraction, minimum), maximum)
