"""The implicit world model: five networks around one latent space (TD-MPC2, section 3.1)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tdmpc.agent.layers import Ensemble, SimNorm, StackedLayer, mlp, run_stacked
from tdmpc.agent.regression import TwoHot
from tdmpc.agent.settings import NetworkSettings


class PolicySample(NamedTuple):
    """One draw from the policy prior: `action [..., A]`; the others `[..., 1]`."""

    action: Tensor
    entropy: Tensor
    scaled_entropy: Tensor


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> Tensor:
    """Return the actions in [-1, 1] that a Gaussian and standard normal `noise` make, all `[..., A]`."""
    return (mean + log_std.exp() * noise).tanh()


class WorldModel(nn.Module):
    """Encoder, dynamics, reward, Q (online and target), policy prior and, when episodic, termination.

    Latents `z [..., D]`, actions `a [..., A]` in [-1, 1], logits over K bins.
    """

    def __init__(self, settings: NetworkSettings) -> None:
        super().__init__()
        s = self.settings = settings
        hidden = [s.mlp_dim, s.mlp_dim]
        encoder_hidden = [s.enc_dim] * max(s.num_enc_layers - 1, 1)
        z_and_action = s.latent_dim + s.action_size
        self.encoder = mlp(s.observation_size, encoder_hidden, s.latent_dim, SimNorm(s.simnorm_dim))
        self.dynamics = mlp(z_and_action, hidden, s.latent_dim, SimNorm(s.simnorm_dim))
        self.reward = mlp(z_and_action, hidden, s.num_bins)
        self.termination = mlp(s.latent_dim, hidden, 1) if s.episodic else None
        self.policy = mlp(s.latent_dim, hidden, 2 * s.action_size)
        self.q = Ensemble(s.num_q, z_and_action, hidden, s.num_bins)
        self.target_q = Ensemble(s.num_q, z_and_action, hidden, s.num_bins).requires_grad_(False)
        self.two_hot = TwoHot(s.num_bins, s.vmin, s.vmax)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the initial weights: truncated normal of std 0.02, biases 0, last layers of reward and Q 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("ln.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
        last_layers: list[Tensor] = [self.reward[-1].weight, self.q[-1].weight]  # pyright: ignore
        for weight in last_layers:
            nn.init.zeros_(weight)
        self.target_q.load_state_dict(self.q.state_dict())

    def encode(self, obs: Tensor) -> Tensor:
        """Return the latents `[..., D]` of observations `[..., O]`."""
        return self.encoder(obs)

    def next(self, z: Tensor, action: Tensor) -> Tensor:
        """Return the next latents `[..., D]`."""
        return self.dynamics(torch.cat([z, action], -1))

    def reward_logits(self, z: Tensor, action: Tensor) -> Tensor:
        """Return the logits of the reward `[..., K]`."""
        return self.reward(torch.cat([z, action], -1))

    def termination_logits(self, z: Tensor) -> Tensor:
        """Return the logits `[..., 1]` of having terminated on arriving at `z`; episodic models only."""
        assert self.termination is not None
        return self.termination(z)

    def q_logits(self, layers: Sequence[StackedLayer], z: Tensor, action: Tensor, drop: Tensor | None = None) -> Tensor:
        """Return the logits `[n, ..., K]` of the heads in `layers`, as given by `q.layers` or `target_q.layers`.

        Args:
            layers: the heads to evaluate; the others cost nothing.
            z: latents `[..., D]`.
            action: actions `[..., A]`.
            drop: dropout factors of the first layer, `[n, M, mlp_dim]` with M the product of the leading axes.
        """
        x = torch.cat([z, action], -1)
        return run_stacked(layers, x.flatten(0, -2), drop).unflatten(1, x.shape[:-1])

    def q_values(self, layers: Sequence[StackedLayer], z: Tensor, action: Tensor) -> Tensor:
        """Return the values `[n, ..., 1]` of the heads in `layers`."""
        return self.two_hot.decode(self.q_logits(layers, z, action))

    def policy_distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation, `[..., A]` each, of the action before it is squashed."""
        return self.policy_parameters(self.policy(z))

    def policy_parameters(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation, `[..., A]` each, that the policy's `output [..., 2A]` stands for."""
        mean, raw = output.chunk(2, -1)
        low, high = self.settings.log_std_min, self.settings.log_std_max
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1)

    def policy_action(self, z: Tensor, noise: Tensor) -> Tensor:
        """Return actions `[..., A]` of the policy prior for standard normal `noise [..., A]`."""
        return squash(*self.policy_distribution(z), noise)

    def policy_sample(self, z: Tensor, noise: Tensor) -> PolicySample:
        """Return actions of the policy prior with their entropy, for standard normal `noise [..., A]`.

        `scaled_entropy` weighs the entropy by the action size, with the ratio of the densities before and after
        squashing, as the published implementation does.
        """
        mean, log_std = self.policy_distribution(z)
        action = squash(mean, log_std, noise)
        gaussian = (-0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)
        log_slope = ((1 - action.square()).relu() + 1e-6).log().sum(-1, keepdim=True)
        log_prob = gaussian - log_slope
        scale = self.settings.action_size * gaussian / (log_prob + 1e-8)
        return PolicySample(action, -log_prob, -log_prob * scale)
