"""TD-MPC2: world model, planner and learner behind `act` and `update`."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tdmpc.agent.compiler_cache import remove_torn_libraries
from tdmpc.agent.compute import EAGER, Compute
from tdmpc.agent.learner import Batch, Learner, UpdateNoise
from tdmpc.agent.planner import Planner, PlannerNoise, PlannerState, shift
from tdmpc.agent.settings import LearnerSettings, NetworkSettings, PlannerSettings, Section, no_section
from tdmpc.agent.world_model import WorldModel


@dataclass
class Lifetime:
    """What the weights have seen, over all runs they were part of.

    Attributes:
        steps: steps of training environments.
        updates: updates.
        merges: rounds of merging that changed them.
    """

    steps: int = 0
    updates: int = 0
    merges: int = 0


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
        compute: precision of products, and the compiler.
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
        compute: Compute = EAGER,
        section: Section = no_section,
    ) -> None:
        self.network, self.planner, self.discount, self.device = network, planner, discount, device
        self.model = WorldModel(network)
        self.model.initialise(torch.Generator().manual_seed(init_seed))
        self.model.to(device)
        self._learner = Learner(self.model, learner, discount, compute, section) if learner else None
        self._use(compute)
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
        return PlannerState(mean, mean[:, :0], torch.Generator(self.device).manual_seed(seed), num_envs)

    def compile(self, num_envs: Collection[int], batch_size: int) -> str | None:
        """Compile what will be called, plans for these numbers of environments and updates of this batch size.

        Otherwise the first calls do it. Nothing that was learned or drawn changes.

        Returns:
            Why it could not be done, in one line, if it could not; `compute` is EAGER from then on.
        """
        if not self.compute.compile:
            return None
        compute = self.compute
        try:
            try:
                self._compile(num_envs, batch_size)
            except Exception:
                if not remove_torn_libraries():
                    raise
                self._use(compute)
                self._compile(num_envs, batch_size)
        except Exception as error:  # whatever a compiler and its tool chain come up with
            self._use(EAGER)
            return str(error).strip().splitlines()[0]
        return None

    def _compile(self, num_envs: Collection[int], batch_size: int) -> None:
        for count in num_envs if self.planner.mpc else ():
            state = self.initial_state(count, seed=0)
            obs = torch.zeros(count, self.network.observation_size, device=self.device)
            self.act(obs, state, torch.ones(count, dtype=torch.bool, device=self.device), explore=True)
        if self._learner is not None:
            self._learner.compile(batch_size)

    def _use(self, compute: Compute) -> None:
        self.compute = compute
        self._planner = Planner(self.model, self.planner, self.discount, compute)
        if self._learner is not None:
            self._learner.use(compute)

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
        if not self.planner.mpc:
            return self._act_from_policy(obs, state, explore), state
        if state.queue.shape[1] > 0 and not first.any():
            return state.queue[:, 0], replace(state, queue=state.queue[:, 1:])
        return self._act_from_plan(obs, state, first, explore)

    def _act_from_plan(
        self, obs: Tensor, state: PlannerState, first: Tensor, explore: bool
    ) -> tuple[Tensor, PlannerState]:
        num_envs, taken = len(obs), self.planner.plan_every - state.queue.shape[1]
        mean = shift(state.mean, first, taken)
        # What is compiled is compiled for a number of environments: where some have ended, others stand in.
        lacking = state.capacity - num_envs if self.compute.compile else 0
        obs, mean = _pad(obs, lacking), _pad(mean, lacking)
        noise = PlannerNoise.draw(
            self.planner, len(obs), self.network.action_size, self.network.num_q, explore, state.generator
        )
        with self.section("plan"):
            actions, mean = self._planner.plan(obs, mean, noise)
        return actions[:num_envs, 0], replace(state, mean=mean[:num_envs], queue=actions[:num_envs, 1:])

    def _act_from_policy(self, obs: Tensor, state: PlannerState, explore: bool) -> Tensor:
        shape = (len(obs), self.network.action_size)
        noise = torch.randn(shape, generator=state.generator, device=self.device)
        return self.model.policy_action(self.model.encode(obs), noise * explore)

    def update(self, batch: TensorDictBase) -> TensorDict:
        """Do one update on a batch of slices and return its metrics (see `Learner.update`), on the device.

        Args:
            batch: obs `[H+1, B, O]`, action `[H, B, A]`, reward and terminated `[H, B, 1]`.
        """
        slices = Batch(*(batch[name] for name in Batch._fields))
        noise = UpdateNoise.draw(self.model, self.learner.settings.dropout, slices.action.shape, self._generator)
        metrics = self.learner.update(slices, noise)
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

    def merge_state(self, moments: bool) -> dict[str, Tensor]:
        """Return what workers merge, as the live tensors by name: what is copied into them, the agent goes on with.

        That is `model.<parameter>`, online and target networks, and `scale`, the running scale of Q.

        Args:
            moments: whether Adam's moments are merged too, `<moment>.<parameter>`. Before the first update there are
                none, and zeros stand in, which nothing reads. Its count of steps is each worker's own.
        """
        parameters = dict(self.model.named_parameters())
        state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
        state["scale"] = self.learner.scale.value
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        kept = {**self.learner.optimizer.state, **self.learner.policy_optimizer.state}
        for moment in ("exp_avg", "exp_avg_sq") if moments else ():
            for name, parameter in trained.items():
                of_parameter = kept.get(parameter)
                state[f"{moment}.{name}"] = of_parameter[moment] if of_parameter else torch.zeros_like(parameter)
        return state

    def state_dict(self) -> dict[str, Any]:
        """Return all that continues the agent exactly, besides `weights()`: optimisers and random stream."""
        return {"learner": self.learner.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, after `load_weights` of the same moment."""
        self.learner.load_state_dict(state["learner"])
        self._generator.set_state(state["generator"])


def _pad(tensor: Tensor, count: int) -> Tensor:
    """Add `count` zero rows."""
    return torch.cat([tensor, tensor.new_zeros(count, *tensor.shape[1:])]) if count else tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()
