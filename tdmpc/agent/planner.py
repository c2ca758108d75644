"""Model predictive path integral control in latent space, for a batch of environments (TD-MPC2, section 3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tdmpc.agent.layers import draw_heads, stack_layers
from tdmpc.agent.settings import PlannerSettings
from tdmpc.agent.world_model import WorldModel


@dataclass
class PlannerState:
    """What acting carries from one step to the next; it belongs to the caller, one for each set of environments.

    Attributes:
        mean: the last solution of every environment, `[E, H, A]`: the warm start of the next plan.
        generator: the random stream of all noise in acting.
    """

    mean: Tensor
    generator: torch.Generator

    def state_dict(self) -> dict[str, Tensor]:
        """Return what continues acting exactly."""
        return {"mean": self.mean.cpu(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of as many environments."""
        self.mean = state["mean"].to(self.mean.device)
        self.generator.set_state(state["generator"])

    def select(self, index: Tensor) -> "PlannerState":
        """Return the state of the environments that `index [n]` (int64) names, with the same random stream."""
        return PlannerState(self.mean[index], self.generator)


class PlannerNoise(NamedTuple):
    """All that is random in one plan, drawn beforehand so that planning itself is a pure function.

    I iterations, E environments, N samples, P policy trajectories, K elites, H horizon, A action size.
    """

    policy: Tensor  # [H, E, P, A] standard normal
    sample: Tensor  # [I, E, N-P, H, A] standard normal
    terminal: Tensor  # [I, E, N, A] standard normal
    heads: Tensor  # [I, 2] indices of two Q heads
    choice: Tensor  # [E, K] standard exponential
    explore: Tensor  # [E, A] standard normal; zeros: no exploration

    @classmethod
    def draw(
        cls,
        s: PlannerSettings,
        num_envs: int,
        action_size: int,
        num_q: int,
        explore: bool,
        generator: torch.Generator,
    ) -> "PlannerNoise":
        """Draw the noise of one plan for `num_envs` environments, on the generator's device."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device)

        return cls(
            policy=normal(s.horizon, num_envs, s.num_pi_trajs, action_size),
            sample=normal(s.iterations, num_envs, s.num_samples - s.num_pi_trajs, s.horizon, action_size),
            terminal=normal(s.iterations, num_envs, s.num_samples, action_size),
            heads=draw_heads(num_q, s.iterations, generator=generator),
            choice=torch.empty(num_envs, s.num_elites, device=generator.device).exponential_(generator=generator),
            explore=normal(num_envs, action_size) * explore,
        )


class Rollout(NamedTuple):
    """Trajectories at their horizon: `z [E, N, D]`; `value` and `alive` `[E, N, 1]`, alive 0 once terminated."""

    z: Tensor
    value: Tensor
    alive: Tensor

    def join(self, other: "Rollout") -> "Rollout":
        """Return the trajectories of both, along N."""
        return Rollout(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


class Imagination:
    """The model as the planner uses it: the same function as the world model, with less arithmetic.

    Reward and dynamics read the same input through hidden layers of the same shape, so they run as two stacked
    networks. At the first step all trajectories of an environment share `z_0`, whose part of the first product is
    computed once for all of them, and in all iterations.

    Built for one plan: it holds copies of the weights.
    """

    def __init__(self, model: WorldModel, discount: float) -> None:
        self.model, self.discount = model, discount
        hidden = [(model.dynamics[i], model.reward[i]) for i in range(len(model.dynamics) - 1)]
        self.first, *self.hidden = [stack_layers(pair) for pair in hidden]  # pyright: ignore
        latent_dim = model.settings.latent_dim
        self.first_z = self.first._replace(weight=self.first.weight[..., :latent_dim])
        self.first_action = self.first.weight[..., latent_dim:].mT

    def share(self, z0: Tensor) -> Tensor:
        """Return the part of the first product that `z0 [E, D]` makes, for `start`: `[2, E, 1, mlp_dim]`."""
        return self.first_z.product(z0).unsqueeze(2)

    def start(self, shared: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return next latents and rewards of the first actions `[E, N, A]`, from `share(z0)`."""
        from_action = torch.matmul(action.flatten(0, 1), self.first_action).unflatten(1, action.shape[:2])
        return self._finish(shared + from_action)

    def step(self, z: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return next latents `[E, N, D]` and rewards `[E, N, 1]`."""
        x = torch.cat([z, action], -1)
        return self._finish(self.first.product(x.flatten(0, 1)).unflatten(1, x.shape[:2]))

    def _finish(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Run everything after the first product, `h [2, E, N, mlp_dim]`."""
        batch = h.shape[1:3]
        h = self.first.activate(h).flatten(1, 2)
        for layer in self.hidden:
            h = layer.activate(layer.product(h))
        z = self.model.dynamics[-1](h[0]).unflatten(0, batch)
        reward = self.model.two_hot.decode(self.model.reward[-1](h[1])).unflatten(0, batch)
        return z, reward

    def alive(self, z: Tensor) -> Tensor:
        """Return 1 where the model does not predict termination on arrival at `z`, else 0: `[..., 1]`."""
        if self.model.termination is None:
            return torch.ones_like(z[..., :1])
        # A logit of 0 is a probability of 0.5.
        return (self.model.termination_logits(z) <= 0).to(z.dtype)

    def roll(self, shared: Tensor, horizon: int, action_at: Callable[[int, Tensor | None], Tensor]) -> Rollout:
        """Follow trajectories from `share(z0)`, summing discounted rewards until a predicted termination.

        Args:
            shared: from `share`.
            horizon: how many steps.
            action_at: gives the actions `[E, N, A]` of step t at latents `[E, N, D]`; at step 0 there are none yet.
        """
        z, value = self.start(shared, action_at(0, None))
        alive = self.alive(z)
        for t in range(1, horizon):
            z, reward = self.step(z, action_at(t, z))
            value = value + self.discount**t * alive * reward
            alive = alive * self.alive(z)
        return Rollout(z, value, alive)

    def roll_actions(self, shared: Tensor, actions: Tensor) -> Rollout:
        """Follow the action sequences `[E, N, H, A]`."""
        return self.roll(shared, actions.shape[2], lambda t, _: actions[:, :, t])

    def roll_policy(self, z0: Tensor, shared: Tensor, noise: Tensor) -> tuple[Tensor, Rollout]:
        """Follow the policy prior from `z0 [E, D]` for `noise [H, E, P, A]`: actions `[E, P, H, A]` and the end."""
        actions = []

        def act(t: int, z: Tensor | None) -> Tensor:
            actions.append(self.model.policy_action(z0.unsqueeze(1) if z is None else z, noise[t]))
            return actions[-1]

        end = self.roll(shared, len(noise), act)
        return torch.stack(actions, 2), end

    def value(self, end: Rollout, horizon: int, heads: Tensor, noise: Tensor) -> Tensor:
        """Return the values `[E, N]` of trajectories: their rewards, and two Q heads at the end; NaN counts as 0."""
        action = self.model.policy_action(end.z, noise)
        q = self.model.q_values(self.model.q.layers(heads), end.z, action).mean(0)
        return (end.value + self.discount**horizon * end.alive * q).squeeze(-1).nan_to_num(nan=0.0)


def shift(mean: Tensor, first: Tensor) -> Tensor:
    """Return the warm start `[E, H, A]`: the last solution one step on, zeros where an episode begins (`first [E]`)."""
    shifted = torch.cat([mean[:, 1:], torch.zeros_like(mean[:, :1])], 1)
    return shifted.masked_fill(first.view(-1, 1, 1), 0)


def plan(
    imagination: Imagination, settings: PlannerSettings, z0: Tensor, mean: Tensor, noise: PlannerNoise
) -> tuple[Tensor, Tensor]:
    """Search for the best action sequences.

    Args:
        imagination: the model.
        settings: of the search.
        z0: latents of the current observations, `[E, D]`.
        mean: warm start, `[E, H, A]`, see `shift`.
        noise: all randomness of the search.

    Returns:
        The actions to take, `[E, A]` in [-1, 1], and the solution `[E, H, A]`.
    """
    s = settings
    shared = imagination.share(z0)
    # The policy's trajectories depend on nothing that the iterations change: only their last value is drawn anew.
    policy_actions, policy_end = imagination.roll_policy(z0, shared, noise.policy)
    std = torch.full_like(mean, s.max_std)
    for i in range(s.iterations):
        sampled = (mean.unsqueeze(1) + std.unsqueeze(1) * noise.sample[i]).clamp(-1, 1)
        end = policy_end.join(imagination.roll_actions(shared, sampled))
        value = imagination.value(end, s.horizon, noise.heads[i], noise.terminal[i])
        elite_value, elite = value.topk(s.num_elites, dim=1)
        actions = torch.cat([policy_actions, sampled], 1)
        elite_actions = actions.gather(1, elite[..., None, None].expand(-1, -1, *actions.shape[2:]))
        weight = torch.softmax(s.temperature * elite_value, 1)
        mean, std = _moments(elite_actions, weight[..., None, None], s.min_std, s.max_std)
    # The largest weight/exponential is a draw from the distribution that the weights are (exponential race).
    chosen = (weight / noise.choice).argmax(1)
    action = elite_actions[torch.arange(len(chosen), device=chosen.device), chosen, 0]
    return (action + std[:, 0] * noise.explore).clamp(-1, 1), mean


def _moments(actions: Tensor, weight: Tensor, min_std: float, max_std: float) -> tuple[Tensor, Tensor]:
    """Return weighted mean and clamped standard deviation over the elites: `[E, K, H, A]` to `[E, H, A]`."""
    mean = (weight * actions).sum(1)
    variance = (weight * (actions - mean.unsqueeze(1)).square()).sum(1)
    return mean, variance.sqrt().clamp(min_std, max_std)
