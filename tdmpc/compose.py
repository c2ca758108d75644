"""Put the parts together as a configuration says. The parts do not know each other, nor the configuration."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from envs import VectorEnv, make_vector
from tdmpc.agent.agent import TDMPC2
from tdmpc.agent.settings import LearnerSettings, NetworkSettings, PlannerSettings, discount_factor, pick
from tdmpc.config import EvaluateConfig, TrainConfig
from tdmpc.keys import ConfigError
from tdmpc.replay import ReplayBuffer, bytes_needed
from tdmpc.seeding import Seeds, Stream
from tdmpc.telemetry.recorder import Recorder
from tdmpc.training.checkpoint import check_sizes, load_weights, save_weights
from tdmpc.training.evaluation import Evaluator
from tdmpc.training.trainer import Trainer, TrainerSettings

MAX_EVAL_ENVS = 10  # evaluation environments that are stepped together; more episodes run in groups


def set_up_torch(config: TrainConfig | EvaluateConfig) -> torch.device:
    """Set the number of threads and return the device to compute on.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device; allowed here: auto, cpu")
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def build_trainer(config: TrainConfig, run: Path, recorder: Recorder, stack: ExitStack) -> Trainer:
    """Build everything that a run needs.

    Args:
        config: of the run.
        run: its directory.
        recorder: where its metrics go.
        stack: closes what was opened.

    Raises:
        ConfigError, TaskError, CheckpointError: a key does not fit what it names.
    """
    device = set_up_torch(config)
    seeds = Seeds(config.seed)
    envs = stack.enter_context(make_vector(config.task, config.num_envs, vector=config.vector, options=config.env))
    sizes = {"observation_size": envs.observation_size, "action_size": envs.action_size}
    network = pick(NetworkSettings, config, **sizes)
    learner = pick(LearnerSettings, config)
    agent = _build_agent(config, network, learner, envs.max_episode_steps, seeds, device)
    if config.checkpoint is not None:
        weights = load_weights(config.checkpoint)
        check_sizes(config.checkpoint, weights["network"], asdict(network))
        agent.load_weights(weights)
    replay = _build_replay(config, envs, seeds, device, recorder)
    return Trainer(
        agent=agent,
        envs=envs,
        replay=replay,
        evaluator=Evaluator(agent, _eval_envs(config, MAX_EVAL_ENVS, stack), seeds),
        recorder=recorder,
        seeds=seeds,
        settings=pick(TrainerSettings, config, seed_steps=_seed_steps(config, envs)),
        save=lambda step: save_weights(run, step, agent.weights()) if config.save_agent else None,
    )


def build_evaluator(config: EvaluateConfig, stack: ExitStack) -> Evaluator:
    """Build an agent with the weights and sizes of `config.checkpoint`, and environments for it.

    Raises:
        ConfigError, TaskError, CheckpointError: a key does not fit what it names.
    """
    device = set_up_torch(config)
    seeds = Seeds(config.seed)
    weights = load_weights(config.checkpoint)
    network = NetworkSettings(**weights["network"])
    envs = _eval_envs(config, config.num_envs, stack)
    here = {"observation_size": envs.observation_size, "action_size": envs.action_size}
    check_sizes(config.checkpoint, weights["network"], here)
    learner = pick(LearnerSettings, TrainConfig(horizon=config.horizon))  # there to be loaded, never to learn
    agent = _build_agent(config, network, learner, envs.max_episode_steps, seeds, device)
    agent.load_weights(weights)
    return Evaluator(agent, envs, seeds)


def _build_agent(
    config: TrainConfig | EvaluateConfig,
    network: NetworkSettings,
    learner: LearnerSettings,
    episode_length: int,
    seeds: Seeds,
    device: torch.device,
) -> TDMPC2:
    # Large action spaces get two more iterations, as published.
    iterations = config.iterations + (2 if network.action_size >= 20 else 0)
    return TDMPC2(
        network,
        pick(PlannerSettings, config, iterations=iterations),
        learner,
        discount=discount_factor(episode_length, config.discount_denom, config.discount_min, config.discount_max),
        init_seed=seeds.integer(Stream.INIT),
        update_seed=seeds.integer(Stream.UPDATE),
        device=device,
    )


def _eval_envs(config: TrainConfig | EvaluateConfig, at_most: int, stack: ExitStack) -> VectorEnv:
    num_envs = min(config.eval_episodes, at_most)
    return stack.enter_context(make_vector(config.task, num_envs, vector="sync", options=config.env))


def _seed_steps(config: TrainConfig, envs: VectorEnv) -> int:
    return max(1000, 5 * envs.max_episode_steps) if config.seed_steps is None else config.seed_steps


def _build_replay(
    config: TrainConfig, envs: VectorEnv, seeds: Seeds, device: torch.device, recorder: Recorder
) -> ReplayBuffer:
    """Build the replay on the device that learns from it, so that sampling moves nothing but indices."""
    shape = {
        "num_envs": config.num_envs,
        "capacity": config.buffer_size,
        "observation_size": envs.observation_size,
        "action_size": envs.action_size,
    }
    needed, free = bytes_needed(**shape), _free_bytes(device)
    recorder.announce(f"replay: {config.buffer_size:,} rows, {needed / 1e6:.0f} MB when full")
    if needed > free:
        raise ConfigError(
            f"buffer_size={config.buffer_size}: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        )
    return ReplayBuffer(**shape, horizon=config.horizon, rng=seeds.generator(Stream.REPLAY), device=device)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
