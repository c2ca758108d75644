"""Losses, optimisers, running scale and target network: one update of the agent (TD-MPC2, section 3.2)."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

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
        drop = None
        if dropout > 0:
            drop = torch.empty(num_q, horizon * batch, model.settings.mlp_dim, device=device)
            drop.bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)
        return cls(
            target_action=torch.randn(horizon, batch, action_size, generator=generator, device=device),
            target_heads=draw_heads(num_q, generator=generator),
            drop=drop,
            policy_action=torch.randn(horizon + 1, batch, action_size, generator=generator, device=device),
            policy_heads=draw_heads(num_q, generator=generator),
        )


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
        section: brackets the parts of an update by name, for whoever wants to measure them.
    """

    def __init__(
        self, model: WorldModel, settings: LearnerSettings, discount: float, section: Section = no_section
    ) -> None:
        s = self.settings = settings
        self.model, self.discount, self.section = model, discount, section
        device = model.two_hot.bins.device
        self.scale = RunningScale(s.tau).to(device)
        self.rho = torch.pow(s.rho, torch.arange(s.horizon + 1, device=device)).view(-1, 1, 1)
        trained = [model.dynamics, model.reward, model.q, *([model.termination] if model.termination else [])]
        encoder = list(model.encoder.parameters())
        others = [p for module in trained for p in module.parameters()]
        self.world_parameters = encoder + others
        self.policy_parameters = list(model.policy.parameters())
        self.optimizer = torch.optim.Adam(
            [{"params": encoder, "lr": s.lr * s.enc_lr_scale}, {"params": others}], lr=s.lr, fused=True
        )
        self.policy_optimizer = torch.optim.Adam(self.policy_parameters, lr=s.lr, eps=1e-5, fused=True)

    def update(self, batch: TensorDictBase, noise: UpdateNoise) -> TensorDict:
        """Do one update.

        Args:
            batch: obs `[H+1, B, O]`, action `[H, B, A]`, reward and terminated `[H, B, 1]`.
            noise: all randomness of the update.

        Returns:
            Losses, gradient norms (before clipping) and statistics: detached scalars on the device.
        """
        with self.section("model"):
            loss, latents, metrics = self.world_loss(batch, noise)
            metrics["grad_norm"] = self._descend(loss, self.optimizer, self.world_parameters)
        with self.section("policy"):
            policy_loss, policy_metrics = self.policy_loss(latents, noise)
            metrics |= policy_metrics
            metrics["pi_grad_norm"] = self._descend(policy_loss, self.policy_optimizer, self.policy_parameters)
        with self.section("target"):
            self.update_target()
        return TensorDict({name: value.detach() for name, value in metrics.items()})

    @torch.no_grad()
    def td_target(self, next_z: Tensor, batch: TensorDictBase, noise: UpdateNoise) -> Tensor:
        """Return `r + gamma (1 - terminated) min of two target heads`, `[H, B, 1]`; truncation bootstraps."""
        action = self.model.policy_action(next_z, noise.target_action)
        heads = self.model.target_q.layers(noise.target_heads)
        q = self.model.q_values(heads, next_z, action).amin(0)
        return batch["reward"] + self.discount * (1 - batch["terminated"]) * q

    def world_loss(self, batch: TensorDictBase, noise: UpdateNoise) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss of world model and Q, the latents `[H+1, B, D]` (detached) and the metrics."""
        model, s, action = self.model, self.settings, batch["action"]
        with torch.no_grad():
            next_z = model.encode(batch["obs"][1:])
            target = self.td_target(next_z, batch, noise)
        latents = self._unroll(batch["obs"][0], action)
        z, rho = latents[:-1], self.rho[:-1]
        reward_error = model.two_hot.cross_entropy(model.reward_logits(z, action), batch["reward"])
        q_logits = model.q_logits(model.q.layers(), z, action, noise.drop)
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
        if model.termination is not None:
            metrics |= self._termination_metrics(latents[1:], batch["terminated"])
            loss = loss + s.termination_coef * metrics["termination_loss"]
        metrics["total_loss"] = loss
        return loss, latents.detach(), metrics

    def policy_loss(self, latents: Tensor, noise: UpdateNoise) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the policy prior on detached latents `[H+1, B, D]`, and the metrics.

        Updates the running scale from the Q values at t = 0 first.
        """
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
        for target, online in zip(self.model.target_q.parameters(), self.model.q.parameters(), strict=True):
            target.lerp_(online, self.settings.tau)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimisers."""
        return {"optimizer": self.optimizer.state_dict(), "policy_optimizer": self.policy_optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of both optimisers."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy_optimizer.load_state_dict(state["policy_optimizer"])

    def _unroll(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the latents `[H+1, B, D]` that the dynamics predict from the first observation `[B, O]`."""
        latents = [self.model.encode(obs)]
        for a in action:
            latents.append(self.model.next(latents[-1], a))
        return torch.stack(latents)

    def _termination_metrics(self, z: Tensor, terminated: Tensor) -> dict[str, Tensor]:
        """Return the loss at `z [H, B, D]`, and at the end of the slices the rate of terminations and their F1 score.

        A termination can only be at the end of a slice, so counting the other rows would dilute both.
        """
        logits = self.model.termination_logits(z)
        true, predicted = terminated[-1], (logits[-1] > 0).to(terminated.dtype)
        return {
            "termination_loss": F.binary_cross_entropy_with_logits(logits, terminated),
            "termination_rate": true.mean(),
            "termination_f1": 2 * (predicted * true).sum() / (predicted.sum() + true.sum() + 1e-9),
        }

    def _descend(self, loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Tensor:
        """Take one clipped gradient step and return the norm of the gradient before clipping."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip_norm)
        optimizer.step()
        return norm
