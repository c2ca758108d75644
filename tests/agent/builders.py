"""Small agents for tests."""

from dataclasses import replace

import torch

from tdmpc.agent.agent import TDMPC2
from tdmpc.agent.compute import EAGER
from tdmpc.agent.planner import Imagination, PlanningWeights
from tdmpc.agent.settings import LearnerSettings, NetworkSettings, PlannerSettings

NETWORK = NetworkSettings(
    observation_size=3,
    action_size=2,
    episodic=False,
    enc_dim=16,
    num_enc_layers=2,
    mlp_dim=16,
    latent_dim=16,
    num_q=3,
    num_bins=21,
    vmin=-10,
    vmax=10,
    simnorm_dim=8,
    log_std_min=-10,
    log_std_max=2,
)
PLANNER = PlannerSettings(
    mpc=True,
    plan_every=1,
    horizon=3,
    iterations=2,
    num_samples=32,
    num_elites=8,
    num_pi_trajs=4,
    min_std=0.05,
    max_std=2,
    temperature=0.5,
)
LEARNER = LearnerSettings(
    horizon=3,
    rho=0.5,
    consistency_coef=20,
    reward_coef=0.1,
    value_coef=0.1,
    termination_coef=1,
    entropy_coef=1e-4,
    lr=3e-4,
    enc_lr_scale=0.3,
    grad_clip_norm=20,
    tau=0.01,
    dropout=0.01,
)


def make_agent(network=None, planner=None, learner=None, *, discount=0.99, seed=0, compute=EAGER) -> TDMPC2:
    """Make a small agent; the arguments name what differs from the settings above."""
    return TDMPC2(
        replace(NETWORK, **(network or {})),
        replace(PLANNER, **(planner or {})),
        replace(LEARNER, **(learner or {})),
        discount=discount,
        init_seed=seed,
        update_seed=seed + 1,
        device=torch.device("cpu"),
        compute=compute,
    )


def imagine(agent: TDMPC2, dtype: torch.dtype = torch.float32) -> Imagination:
    """Return the model of an agent as its planner uses it."""
    return Imagination(agent.model, PlanningWeights.of(agent.model, dtype), agent.discount)
