"""Losses, optimisers, running scale and target network: one update of the agent (TD-MPC2, section 3.2)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from tdmpc.agent.compute import Compute
from tdmpc.agent.layers import draw_heads
from tdmpc.agent.settings import LearnerSettings, Section, no_section
from tdmpc.agent.world_model import WorldModel


class UpdateNoise(NamedTuple):
    """All that is random in one update. H horizon, B batch, A action size, Q heads."""

    target_action: Tensor  # [H, B, A] standard normal
    target_heads: Tensor  # [2] indices of two target Q heads
    drop: Tensor | None  # [Q, H*B, mlp_dim] dropout factors, 0 or 1/(1-p)
    policy_action: Tensor  # [H+1, B, A] standard normal
    policy_heads: Tensor  # [2] indices of two Q heads

    @classmethod
    def draw(
        cls, model: WorldModel, dropout: float, batch_shape: torch.Size, generator: torch.Generator
    ) -> "UpdateNoise":
        """Draw the noise of one update for actions of `batch_shape` [H, B, A], on the generator's device."""
        horizon, batch, action_size = batch_shape
        num_q, device = model.settings.num_q, generator.device
        drop_shape = (num_q, horizon * batch, model.settings.mlp_dim)
        drop = draw_dropout(drop_shape, dropout, generator) if dropout > 0 else None
        return cls(
            target_action=torch.randn(horizon, batch, action_size, generator=generator, device=device),
            target_heads=draw_heads(num_q, generator=generator),
            drop=drop,
            policy_action=torch.randn(horizon + 1, batch, action_size, generator=generator, device=device),
            policy_heads=draw_heads(num_q, generator=generator),
        )


def draw_dropout(shape: tuple[int, ...], p: float, generator: torch.Generator) -> Tensor:
    """Return independent factors that are 0 with probability `p`, else 1/(1-p), on the generator's device.

    The distances between zeros are geometric, so drawing these takes `p` draws an element: for the usual p = 0.01 an
    order of magnitude less time than drawing every element.
    """
    size = math.prod(shape)
    mean, deviation = size * p, math.sqrt(size * p * (1 - p))
    # Enough to pass the end but once in 10^15 draws; those beyond it fall on one element too many.
    count = min(size, math.ceil(mean + 8 * deviation) + 8)
    gaps = torch.empty(count, dtype=torch.int64, device=generator.device).geometric_(p, generator=generator)
    factors = torch.full((size + 1,), 1 / (1 - p), device=generator.device)
    factors[gaps.cumsum(0).sub_(1).clamp_(max=size)] = 0
    return factors[:size].view(shape)


class Batch(NamedTuple):
    """Slices to learn from. H horizon, B batch, O observation size, A action size."""

    obs: Tensor  # [H+1, B, O]
    action: Tensor  # [H, B, A]
    reward: Tensor  # [H, B, 1]
    terminated: Tensor  # [H, B, 1], 0 or 1


class RunningScale(nn.Module):
    """Running spread of the Q values, which makes the policy loss invariant to the scale of returns.

    The spread is the distance of the 5th to the 95th percentile, at least 1; it starts at 1.
    """

    value: Tensor
    percentiles: Tensor

    def __init__(self, tau: float) -> None:
        super().__init__()
        self.tau = tau
        self.register_buffer("value", torch.ones(()))
        self.register_buffer("percentiles", torch.tensor([0.05, 0.95]), persistent=False)

    @torch.no_grad()
    def update(self, q: Tensor) -> None:
        """Move towards the spread of `q`, any shape."""
        low, high = torch.quantile(q.flatten(), self.percentiles)
        self.value.lerp_((high - low).clamp(min=1.0), self.tau)


class Learner:
    """Optimise a world model and its policy prior on batches of slices.

    Args:
        model: to optimise.
        settings: of losses and optimisers.
        discount: gamma.
        compute: precision of products, and the compiler.
        section: brackets the parts of an update by name, for whoever wants to measure them.
    """

    def __init__(
        self,
        model: WorldModel,
        settings: LearnerSettings,
        discount: float,
        compute: Compute,
        section: Section = no_section,
    ) -> None:
        s = self.settings = settings
        self.model, self.discount, self.section = model, discount, section
        self.use(compute)
        device = model.two_hot.bins.device
        self.scale = RunningScale(s.tau).to(device)
        self.rho = torch.pow(s.rho, torch.arange(s.horizon + 1, device=device)).view(-1, 1, 1)
        trained = [model.dynamics, model.reward, model.q, *([model.termination] if model.termination else [])]
        encoder = list(model.encoder.parameters())
        others = [p for module in trained for p in module.parameters()]
        self.world_parameters = encoder + others
        self.policy_parameters = list(model.policy.parameters())
        self._q_parameters: list[Tensor] = list(model.q.parameters())
        self._target_parameters: list[Tensor] = list(model.target_q.parameters())
        self.optimizer = torch.optim.Adam(
            [{"params": encoder, "lr": s.lr * s.enc_lr_scale}, {"params": others}], lr=s.lr, fused=True
        )
        self.policy_optimizer = torch.optim.Adam(self.policy_parameters, lr=s.lr, eps=1e-5, fused=True)

    def update(self, batch: Batch, noise: UpdateNoise) -> TensorDict:
        """Do one update.

        Args:
            batch: slices to learn from.
            noise: all randomness of the update.

        Returns:
            Losses, gradient norms (before clipping) and statistics: detached scalars on the device.
        """
        with self.section("model"):
            loss, latents, metrics = self._world_loss(batch, noise)
            metrics["grad_norm"] = self._descend(loss, self.optimizer, self.world_parameters)
        with self.section("policy"):
            policy_loss, policy_metrics = self._policy_loss(latents, noise)
            metrics |= policy_metrics
            metrics["pi_grad_norm"] = self._descend(policy_loss, self.policy_optimizer, self.policy_parameters)
        with self.section("target"):
            self.update_target()
        return TensorDict({name: value.detach() for name, value in metrics.items()})

    def use(self, compute: Compute) -> None:
        """Compute otherwise from now on."""
        self.compute = compute
        self._world_loss = compute.compiled(self.world_loss)
        self._policy_loss = compute.compiled(self.policy_loss)

    def compile(self, batch_size: int) -> None:
        """Compile the losses and their gradients for a batch size; nothing that was learned or drawn changes."""
        sizes, horizon, device = self.model.settings, self.settings.horizon, self.rho.device
        batch = Batch(
            obs=torch.zeros(horizon + 1, batch_size, sizes.observation_size, device=device),
            action=torch.zeros(horizon, batch_size, sizes.action_size, device=device),
            reward=torch.zeros(horizon, batch_size, 1, device=device),
            terminated=torch.zeros(horizon, batch_size, 1, device=device),
        )
        noise = UpdateNoise.draw(self.model, self.settings.dropout, batch.action.shape, torch.Generator(device))
        scale = self.scale.value.clone()
        loss, latents, _ = self._world_loss(batch, noise)
        loss.backward()
        policy_loss, _ = self._policy_loss(latents, noise)
        policy_loss.backward()
        self.model.zero_grad()
        self.scale.value.copy_(scale)

    @torch.no_grad()
    def td_target(self, next_z: Tensor, batch: Batch, noise: UpdateNoise) -> Tensor:
        """Return `r + gamma (1 - terminated) min of two target heads`, `[H, B, 1]`; truncation bootstraps."""
        action = self.model.policy_action(next_z, noise.target_action)
        heads = self.model.target_q.layers(noise.target_heads)
        q = self.model.q_values(heads, next_z, action).amin(0)
        return batch.reward + self.discount * (1 - batch.terminated) * q

    def world_loss(self, batch: Batch, noise: UpdateNoise) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss of world model and Q, the latents `[H+1, B, D]` (detached) and the metrics."""
        model, s, action = self.model, self.settings, batch.action
        with self._autocast():
            with torch.no_grad():
                next_z = model.encode(batch.obs[1:])
                target = self.td_target(next_z, batch, noise)
            latents = self._unroll(batch.obs[0], action)
            z, rho = latents[:-1], self.rho[:-1]
            reward_logits = model.reward_logits(z, action)
            q_logits = model.q_logits(model.q.layers(), z, action, noise.drop)
            termination_logits = None if model.termination is None else model.termination_logits(latents[1:])
        reward_error = model.two_hot.cross_entropy(reward_logits, batch.reward)
        metrics = {
            "consistency_loss": (rho * (latents[1:] - next_z).square()).mean(),
            "reward_loss": (rho * reward_error).mean(),
            "value_loss": (rho * model.two_hot.cross_entropy(q_logits, target)).mean(),
        }
        loss = (
            s.consistency_coef * metrics["consistency_loss"]
            + s.reward_coef * metrics["reward_loss"]
            + s.value_coef * metrics["value_loss"]
        )
        if termination_logits is not None:
            metrics |= _termination_metrics(termination_logits, batch.terminated)
            loss = loss + s.termination_coef * metrics["termination_loss"]
        metrics["total_loss"] = loss
        return loss, latents.detach(), metrics

    def policy_loss(self, latents: Tensor, noise: UpdateNoise) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy prior on detached latents `[H+1, B, D]`, and the metrics.

        Updates the running scale from the Q values at t = 0 first.
        """
        with self._autocast():
            sample = self.model.policy_sample(latents, noise.policy_action)
            heads = [layer.map(Tensor.detach) for layer in self.model.q.layers(noise.policy_heads)]
            q = self.model.q_values(heads, latents, sample.action).mean(0)
        self.scale.update(q[0].detach())
        gain = self.settings.entropy_coef * sample.scaled_entropy + q / self.scale.value
        loss = -(self.rho * gain).mean()
        return loss, {
            "pi_loss": loss,
            "pi_entropy": sample.entropy.mean(),
            "pi_scaled_entropy": sample.scaled_entropy.mean(),
            "pi_scale": self.scale.value.clone(),
        }

    @torch.no_grad()
    def update_target(self) -> None:
        """Move the target Q heads towards the online ones by `tau`."""
        torch._foreach_lerp_(self._target_parameters, self._q_parameters, self.settings.tau)  # pyright: ignore

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers."""
        return {"optimizer": self.optimizer.state_dict(), "policy_optimizer": self.policy_optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of both optimisers, with the learning rates of the settings."""
        for optimizer, saved in (
            (self.optimizer, state["optimizer"]),
            (self.policy_optimizer, state["policy_optimizer"]),
        ):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _unroll(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the latents `[H+1, B, D]` that the dynamics predict from the first observation `[B, O]`."""
        latents = [self.model.encode(obs)]
        for a in action:
            latents.append(self.model.next(latents[-1], a))
        return torch.stack(latents)

    def _descend(self, loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Tensor:
        """Take one clipped gradient step and return the norm of the gradient before clipping."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip_norm)
        optimizer.step()
        return norm

    def _autocast(self) -> torch.autocast:
        """Return the context of forward passes, in which products are made in the precision of updates."""
        dtype = self.compute.update_dtype
        return torch.autocast(self.rho.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def _termination_metrics(logits: Tensor, terminated: Tensor) -> dict[str, Tensor]:
    """Return the loss of `logits [H, B, 1]`, and at the end of the slices the rate of terminations and their F1 score.

    A termination can only be at the end of a slice, so counting the other rows would dilute both.
    """
    true, predicted = terminated[-1], (logits[-1] > 0).to(terminated.dtype)
    return {
        "termination_loss": F.binary_cross_entropy_with_logits(logits, terminated),
        "termination_rate": true.mean(),
        "termination_f1": 2 * (predicted * true).sum() / (predicted.sum() + true.sum() + 1e-9),
    }
