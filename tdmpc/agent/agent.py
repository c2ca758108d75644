"""TD-MPC2: world model, planner and learner behind `act` and `update`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tdmpc.agent.learner import Learner, UpdateNoise
from tdmpc.agent.planner import Imagination, PlannerNoise, PlannerState, plan, shift
from tdmpc.agent.settings import LearnerSettings, NetworkSettings, PlannerSettings, Section, no_section
from tdmpc.agent.world_model import WorldModel


@dataclass
class Lifetime:
    """What the weights have seen, over all runs they were part of.

    Attributes:
        steps: steps of training environments.
        updates: updates.
    """

    steps: int = 0
    updates: int = 0


class TDMPC2:
    """The agent. It knows no environment, file or clock; all its randomness comes from the seeds it is given.

    Args:
        network: sizes of the networks.
        planner: settings of the search.
        learner: settings of losses and optimisers; None for an agent that only acts.
        discount: gamma.
        init_seed: seed of the initial weights.
        update_seed: seed of the noise in updates.
        device: where everything lives.
        section: brackets parts of `act` and `update` by name, for whoever wants to measure them.
    """

    def __init__(
        self,
        network: NetworkSettings,
        planner: PlannerSettings,
        learner: LearnerSettings | None,
        *,
        discount: float,
        init_seed: int,
        update_seed: int,
        device: torch.device,
        section: Section = no_section,
    ) -> None:
        self.network, self.planner, self.discount, self.device = network, planner, discount, device
        self.model = WorldModel(network)
        self.model.initialise(torch.Generator().manual_seed(init_seed))
        self.model.to(device)
        self._learner = Learner(self.model, learner, discount, section) if learner else None
        self.section = section
        self.lifetime = Lifetime()
        self._generator = torch.Generator(device).manual_seed(update_seed)

    @property
    def learner(self) -> Learner:
        """The part that updates; only of an agent that was made to learn."""
        assert self._learner is not None
        return self._learner

    def initial_state(self, num_envs: int, seed: int) -> PlannerState:
        """Return the state to hand to the first `act` on `num_envs` environments, with its own random stream."""
        mean = torch.zeros(num_envs, self.planner.horizon, self.network.action_size, device=self.device)
        return PlannerState(mean, torch.Generator(self.device).manual_seed(seed))

    @torch.no_grad()
    def act(self, obs: Tensor, state: PlannerState, first: Tensor, explore: bool) -> tuple[Tensor, PlannerState]:
        """Choose an action for every environment, by planning or, with `mpc=false`, from the policy prior.

        Args:
            obs: observations `[E, O]`; E is that of the state, and may differ between states.
            state: of these environments, from `initial_state` or the last `act`.
            first: where an episode begins, `[E]` bool: there the plan starts anew.
            explore: sample actions as in training; otherwise act as in evaluation.

        Returns:
            Actions `[E, A]` in [-1, 1] and the state for the next call.
        """
        z = self.model.encode(obs)
        if not self.planner.mpc:
            return self._act_from_policy(z, state, explore), state
        noise = PlannerNoise.draw(
            self.planner, len(obs), self.network.action_size, self.network.num_q, explore, state.generator
        )
        with self.section("plan"):
            imagination = Imagination(self.model, self.discount)
            action, mean = plan(imagination, self.planner, z, shift(state.mean, first), noise)
        return action, PlannerState(mean, state.generator)

    def _act_from_policy(self, z: Tensor, state: PlannerState, explore: bool) -> Tensor:
        shape = (len(z), self.network.action_size)
        noise = torch.randn(shape, generator=state.generator, device=self.device)
        return self.model.policy_action(z, noise * explore)

    def update(self, batch: TensorDictBase) -> TensorDict:
        """Do one update on a batch of slices (see `Learner.update`) and return its metrics, on the device."""
        noise = UpdateNoise.draw(self.model, self.learner.settings.dropout, batch["action"].shape, self._generator)
        metrics = self.learner.update(batch, noise)
        self.lifetime.updates += 1
        return metrics

    def weights(self) -> dict[str, Any]:
        """Return a copy of what was learned, for acting and further training: plain types and tensors on the CPU."""
        return {
            "network": asdict(self.network),
            "model": {key: _copy(value) for key, value in self.model.state_dict().items()},
            "scale": _copy(self.learner.scale.value),
            "lifetime": asdict(self.lifetime),
        }

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Take over weights, running scale and lifetime from `weights()` of an agent of the same sizes."""
        self.model.load_state_dict(weights["model"])
        if self._learner is not None:
            self._learner.scale.value.copy_(weights["scale"])
        self.lifetime = Lifetime(**weights["lifetime"])

    def state_dict(self) -> dict[str, Any]:
        """Return all that continues the agent exactly, besides `weights()`: optimisers and random stream."""
        return {"learner": self.learner.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after `load_weights` of the same moment."""
        self.learner.load_state_dict(state["learner"])
        self._generator.set_state(state["generator"])


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()
