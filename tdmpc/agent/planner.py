"""Model predictive path integral control in latent space, for a batch of environments (TD-MPC2, section 3.3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tdmpc.agent.compute import Compute
from tdmpc.agent.layers import SimNorm, StackedLayer, draw_heads, run_stacked, stack_layers, stack_networks
from tdmpc.agent.settings import PlannerSettings
from tdmpc.agent.world_model import WorldModel, squash


@dataclass
class PlannerState:
    """What acting carries from one step to the next; it belongs to the caller, one for each set of environments.

    Attributes:
        mean: the last solution of every environment, `[E, H, A]`: the warm start of the next plan.
        queue: the actions of the last plan that are yet to be taken, `[E, n, A]` with n < `plan_every`.
        generator: the random stream of all noise in acting.
        capacity: the number of environments at the beginning, of which `select` may have left fewer.
    """

    mean: Tensor
    queue: Tensor
    generator: torch.Generator
    capacity: int

    def state_dict(self) -> dict[str, Tensor]:
        """Return what continues acting exactly."""
        return {"mean": self.mean.cpu(), "queue": self.queue.cpu(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of as many environments."""
        self.mean = state["mean"].to(self.mean.device)
        # States of before there was a queue have none.
        self.queue = state.get("queue", self.mean[:, :0]).to(self.mean.device)
        self.generator.set_state(state["generator"])

    def select(self, index: Tensor) -> "PlannerState":
        """Return the state of the environments that `index [n]` (int64) names, with the same random stream."""
        return replace(self, mean=self.mean[index], queue=self.queue[index])


class PlannerNoise(NamedTuple):
    """All that is random in one plan, drawn beforehand so that planning itself is a pure function.

    I iterations, E environments, N samples, P policy trajectories, K elites, H horizon, A action size.
    """

    policy: Tensor  # [H, E, P, A] standard normal
    sample: Tensor  # [I, E, N-P, H, A] standard normal
    terminal: Tensor  # [I, E, N, A] standard normal
    heads: Tensor  # [I, 2] indices of two Q heads
    choice: Tensor  # [E, K] standard exponential
    explore: Tensor  # [E, plan_every, A] standard normal; zeros: no exploration

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
            explore=normal(num_envs, s.plan_every, action_size) * explore,
        )


class Rollout(NamedTuple):
    """Trajectories at their horizon: `z [E, N, D]`; `value` and `alive` `[E, N, 1]`, alive 0 once terminated."""

    z: Tensor
    value: Tensor
    alive: Tensor

    def join(self, other: "Rollout") -> "Rollout":
        """Return the trajectories of both, along N."""
        return Rollout(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))


class PlanningWeights(NamedTuple):
    """The weights of a world model as the planner reads them: stacked, and in the precision of its products.

    Reward and dynamics read the same input through hidden layers of the same shape, so these are stacked. `q` has all
    heads; the other networks are stacks of one.
    """

    first: StackedLayer
    hidden: list[StackedLayer]
    dynamics: StackedLayer
    reward: StackedLayer
    policy: list[StackedLayer]
    q: list[StackedLayer]
    termination: list[StackedLayer] | None

    @classmethod
    def of(cls, model: WorldModel, dtype: torch.dtype) -> "PlanningWeights":
        """Copy the weights of a model."""
        *dynamics, last_of_dynamics = model.dynamics
        *reward, last_of_reward = model.reward
        first, *hidden = stack_networks([dynamics, reward], dtype)
        return cls(
            first=first,
            hidden=hidden,
            dynamics=stack_layers([last_of_dynamics]).rounded(dtype),
            reward=stack_layers([last_of_reward]).rounded(dtype),
            policy=stack_networks([model.policy], dtype),
            q=[layer.rounded(dtype) for layer in model.q.layers()],
            termination=stack_networks([model.termination], dtype) if model.termination is not None else None,
        )


class Imagination:
    """The model as the planner uses it: the same function as the world model, with less arithmetic.

    Reward and dynamics run as two stacked networks. At the first step all trajectories of an environment share `z_0`,
    whose part of the first product is computed once for all of them, and in all iterations.

    Args:
        model: gives the meaning of the networks' outputs.
        weights: of its networks.
        discount: gamma.
    """

    def __init__(self, model: WorldModel, weights: PlanningWeights, discount: float) -> None:
        self.model, self.weights, self.discount = model, weights, discount

    def share(self, z0: Tensor) -> Tensor:
        """Return the part of the first product that `z0 [E, D]` makes, for `start`: `[2, E, 1, mlp_dim]`."""
        first = self.weights.first
        return first._replace(weight=first.weight[..., : z0.shape[-1]]).product(z0).unsqueeze(2)

    def start(self, shared: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return next latents and rewards of the first actions `[E, N, A]`, from `share(z0)`."""
        weight = self.weights.first.weight[..., -action.shape[-1] :]
        from_action = torch.matmul(action.flatten(0, 1).to(weight.dtype), weight.mT)
        return self._finish(shared + from_action.unflatten(1, action.shape[:2]))

    def step(self, z: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return next latents `[E, N, D]` and rewards `[E, N, 1]`."""
        x = torch.cat([z, action], -1)
        return self._finish(self.weights.first.product(x.flatten(0, 1)).unflatten(1, x.shape[:2]))

    def _finish(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Run everything after the first product, `h [2, E, N, mlp_dim]`."""
        weights, batch = self.weights, h.shape[1:3]
        h = weights.first.activate(h).flatten(1, 2)
        for layer in weights.hidden:
            h = layer.activate(layer.product(h))
        simnorm: SimNorm = self.model.dynamics[-1].activation  # pyright: ignore
        z = weights.dynamics.activate(weights.dynamics.product(h[0]), simnorm)
        reward = self.model.two_hot.decode(weights.reward.product(h[1]))
        return z[0].unflatten(0, batch), reward[0].unflatten(0, batch)

    def policy_action(self, z: Tensor, noise: Tensor) -> Tensor:
        """Return actions `[E, N, A]` of the policy prior at latents `[E, N, D]`, for standard normal noise."""
        output = run_stacked(self.weights.policy, z.flatten(0, 1))[0].unflatten(0, z.shape[:2])
        return squash(*self.model.policy_parameters(output), noise)

    def alive(self, z: Tensor) -> Tensor:
        """Return 1 where the model does not predict termination on arrival at `z [E, N, D]`, else 0: `[E, N, 1]`."""
        if self.weights.termination is None:
            return torch.ones_like(z[..., :1])
        logits = run_stacked(self.weights.termination, z.flatten(0, 1))[0].unflatten(0, z.shape[:2])
        # A logit of 0 is a probability of 0.5.
        return (logits <= 0).to(z.dtype)

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
            # At the start the trajectories of an environment differ in their noise alone.
            z = z0.unsqueeze(1) if z is None else z
            actions.append(self.policy_action(z, noise[t]))
            return actions[-1]

        end = self.roll(shared, len(noise), act)
        return torch.stack(actions, 2), end

    def value(self, end: Rollout, horizon: int, heads: Tensor, noise: Tensor) -> Tensor:
        """Return the values `[E, N]` of trajectories: their rewards, and two Q heads at the end; NaN counts as 0."""
        action = self.policy_action(end.z, noise)
        layers = [layer.map(lambda tensor: tensor[heads]) for layer in self.weights.q]
        q = self.model.q_values(layers, end.z, action).mean(0)
        return (end.value + self.discount**horizon * end.alive * q).squeeze(-1).nan_to_num(nan=0.0)


def shift(mean: Tensor, first: Tensor, steps: int) -> Tensor:
    """Return the warm start `[E, H, A]`: the last solution some steps on, zero where an episode begins, `first [E]`."""
    shifted = torch.cat([mean[:, steps:], torch.zeros_like(mean[:, :steps])], 1)
    return shifted.masked_fill(first.view(-1, 1, 1), 0)


class Search(NamedTuple):
    """What all iterations of a plan share."""

    weights: PlanningWeights
    shared: Tensor  # see Imagination.share
    policy_actions: Tensor  # [E, P, H, A]
    policy_end: Rollout


class Solution(NamedTuple):
    """What an iteration of a plan comes to."""

    mean: Tensor  # [E, H, A]
    std: Tensor  # [E, H, A]
    elite_actions: Tensor  # [E, K, H, A]
    weight: Tensor  # [E, K], how much each elite counts


class Planner:
    """Search for the best action sequences.

    One plan is `begin`, then `iterations` times `refine`, then `choose`: the functions that are compiled, so that an
    iteration is compiled once instead of once an iteration.

    Args:
        model: the world model.
        settings: of the search.
        discount: gamma.
        compute: precision of products, and the compiler.
    """

    def __init__(self, model: WorldModel, settings: PlannerSettings, discount: float, compute: Compute) -> None:
        self.model, self.settings, self.discount, self.compute = model, settings, discount, compute
        self._begin = compute.compiled(self.begin)
        self._refine = compute.compiled(self.refine)
        self._choose = compute.compiled(self.choose)

    def plan(self, obs: Tensor, mean: Tensor, noise: PlannerNoise) -> tuple[Tensor, Tensor]:
        """Search from observations.

        Args:
            obs: `[E, O]`.
            mean: the warm start, `[E, H, A]`, see `shift`.
            noise: all randomness of the search.

        Returns:
            The actions to take, `[E, plan_every, A]` in [-1, 1], and the solution `[E, H, A]`.
        """
        search, solution = self._begin(obs, mean, noise.policy)
        for i in range(self.settings.iterations):
            sample, terminal, heads = noise.sample[i], noise.terminal[i], noise.heads[i]
            solution = self._refine(search, solution.mean, solution.std, sample, terminal, heads)
        return self._choose(solution, noise.choice, noise.explore), solution.mean

    def begin(self, obs: Tensor, mean: Tensor, noise: Tensor) -> tuple[Search, Solution]:
        """Return what the iterations share, and the solution to start from, which has no elites yet.

        The policy's trajectories depend on nothing that the iterations change: only their last value is drawn anew.
        """
        z0 = self.model.encode(obs)
        weights = PlanningWeights.of(self.model, self.compute.plan_dtype)
        imagination = Imagination(self.model, weights, self.discount)
        shared = imagination.share(z0)
        policy_actions, policy_end = imagination.roll_policy(z0, shared, noise)
        start = Solution(mean, torch.full_like(mean, self.settings.max_std), mean[:, :0], mean[:, :0, 0])
        return Search(weights, shared, policy_actions, policy_end), start

    def refine(
        self, search: Search, mean: Tensor, std: Tensor, sample: Tensor, terminal: Tensor, heads: Tensor
    ) -> Solution:
        """Do one iteration: sample trajectories, value them, and fit mean and deviation to the best."""
        s = self.settings
        sampled = (mean.unsqueeze(1) + std.unsqueeze(1) * sample).clamp(-1, 1)
        value = self.values(search, sampled, terminal, heads)
        elite_value, elite = value.topk(s.num_elites, dim=1)
        actions = torch.cat([search.policy_actions, sampled], 1)
        elite_actions = actions.gather(1, elite[..., None, None].expand(-1, -1, *actions.shape[2:]))
        weight = torch.softmax(s.temperature * elite_value, 1)
        mean, std = _moments(elite_actions, weight[..., None, None], s.min_std, s.max_std)
        return Solution(mean, std, elite_actions, weight)

    def values(self, search: Search, sampled: Tensor, terminal: Tensor, heads: Tensor) -> Tensor:
        """Return the values `[E, N]` of the policy's trajectories, then of `sampled [E, N-P, H, A]`."""
        imagination = Imagination(self.model, search.weights, self.discount)
        end = search.policy_end.join(imagination.roll_actions(search.shared, sampled))
        return imagination.value(end, self.settings.horizon, heads, terminal)

    def choose(self, solution: Solution, exponential: Tensor, explore: Tensor) -> Tensor:
        """Return actions `[E, plan_every, A]`: those of an elite drawn by weight, and noise of the last deviation."""
        # The largest weight/exponential is a draw from the distribution that the weights are (exponential race).
        chosen = (solution.weight / exponential).argmax(1)
        actions = solution.elite_actions[torch.arange(len(chosen), device=chosen.device), chosen]
        count = self.settings.plan_every
        return (actions[:, :count] + solution.std[:, :count] * explore).clamp(-1, 1)


def _moments(actions: Tensor, weight: Tensor, min_std: float, max_std: float) -> tuple[Tensor, Tensor]:
    """Return weighted mean and clamped standard deviation over the elites: `[E, K, H, A]` to `[E, H, A]`."""
    mean = (weight * actions).sum(1)
    variance = (weight * (actions - mean.unsqueeze(1)).square()).sum(1)
    return mean, variance.sqrt().clamp(min_std, max_std)
