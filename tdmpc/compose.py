"""Put the parts together as a configuration says. The parts do not know each other, nor the configuration."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from envs import RenderError, VectorEnv, make_vector
from tdmpc.agent.agent import TDMPC2
from tdmpc.agent.compute import Compute, has_fast_bf16
from tdmpc.agent.settings import LearnerSettings, NetworkSettings, PlannerSettings, discount_factor, pick
from tdmpc.config import EvaluateConfig, Merge, TrainConfig
from tdmpc.group import build_merger
from tdmpc.keys import ConfigError, to_mapping
from tdmpc.replay import ReplayBuffer, bytes_needed
from tdmpc.replay_segments import ReplaySegments
from tdmpc.seeding import Seeds, Stream
from tdmpc.sharing import own_gpu, set_threads
from tdmpc.telemetry.recorder import Recorder
from tdmpc.telemetry.system import SystemMetrics
from tdmpc.telemetry.timers import Timers
from tdmpc.telemetry.trace import Trace, no_trace
from tdmpc.telemetry.video import Filming, NoVideos, Videos
from tdmpc.training.checkpoint import Checkpoints
from tdmpc.training.collector import Collector
from tdmpc.training.evaluation import Evaluator
from tdmpc.training.progress import Progress
from tdmpc.training.saver import NoSaver, Saver
from tdmpc.training.trainer import Trainer, TrainerSettings
from tdmpc.training.weights import check_sizes, load_weights

NOT_SIZES = ("log_std_min", "log_std_max", "vmin", "vmax")
MIN_COMPILED_CALLS = 3000  # plans and updates that take about as long, uncompiled, as compiling does the first time
MAX_EVAL_ENVS = 10  # evaluation environments that are stepped together; more episodes run in groups


def set_up_torch(config: TrainConfig | EvaluateConfig, announce: Callable[[str], None] = print) -> torch.device:
    """Set the number of threads and return the device to compute on; `announce` is told where others share them.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    merge = config.merge if isinstance(config, TrainConfig) else Merge()
    set_threads(merge, config.threads, announce)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device; allowed here: auto, cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return own_gpu(merge)


def choose_compute(
    config: TrainConfig | EvaluateConfig, device: torch.device, announce: Callable[[str], None]
) -> Compute:
    """Return how to compute; `announce` is told what cannot be had.

    `compile=auto` compiles where it pays within the run, which for an evaluation is hardly ever.
    """
    calls = 0.0
    if isinstance(config, TrainConfig):
        calls = config.steps / config.num_envs + config.steps / config.steps_per_update
    compile = config.compile == "true" or (config.compile == "auto" and calls >= MIN_COMPILED_CALLS)
    if compile and shutil.which(os.environ.get("CXX", "g++")) is None:
        announce("warning: compile: there is no C++ compiler (g++, or what CXX names), going on without")
        compile = False
    mode = config.compile_mode or ("reduce-overhead" if device.type == "cuda" else None)

    def dtype(precision: str) -> torch.dtype:
        # Uncompiled on a CPU, the conversions eat up what the products gain.
        auto = has_fast_bf16(device) and (compile or device.type == "cuda")
        return torch.bfloat16 if precision == "bf16" or (precision == "auto" and auto) else torch.float32

    update_precision = config.update_precision or config.precision
    return Compute(dtype(config.precision), dtype(update_precision), compile, mode if mode != "default" else None)


def build_trainer(
    config: TrainConfig,
    run: Path,
    recorder: Recorder,
    stack: ExitStack,
    should_stop: Callable[[], bool] = lambda: False,
    breaking_off: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Trainer:
    """Build everything that a run needs.

    Args:
        config: of the run.
        run: its directory.
        recorder: where its metrics go.
        stack: closes what was opened.
        should_stop: asked after every iteration.
        breaking_off: a context that a stop ends at once, for what leaves nothing behind.

    Raises:
        ConfigError, TaskError, CheckpointError: a key does not fit what it names.
    """
    device = set_up_torch(config, recorder.announce)
    seeds = Seeds(config.seed, config.merge.worker if config.merge.merges else 0)
    timers, progress = Timers(device=device), Progress()  # at the same moment, so that they agree on what a run takes
    # First, because OpenGL is chosen with the first environment; and because what does not fit should be refused
    # before the processes of training environments are started.
    compute = choose_compute(config, device, recorder.announce)
    num_eval_envs = _num_eval_envs(config, compute, device)
    eval_envs, videos = _eval_envs_and_videos(config, num_eval_envs, run, recorder, timers, stack)
    network, weights = _network_and_weights(config, eval_envs)
    _check_memory(config, eval_envs, device, recorder)
    envs = stack.enter_context(make_vector(config.task, config.num_envs, vector=config.vector, options=config.env))
    learner, episode_length = pick(LearnerSettings, config), envs.max_episode_steps
    init = Seeds(config.seed) if config.merge.shared_init else seeds
    agent = _build_agent(config, network, learner, compute, episode_length, seeds, device, timers, init)
    if weights is not None:
        agent.load_weights(weights)
    seed_steps = _seed_steps(config, envs)
    replay = ReplayBuffer(
        **_replay_shape(config, envs), horizon=config.horizon, rng=seeds.generator(Stream.REPLAY), device=device
    )
    return Trainer(
        agent=agent,
        collector=Collector(agent, envs, replay, seeds, timers, config.episodic),
        replay=replay,
        evaluator=Evaluator(agent, eval_envs, seeds, timers),
        recorder=recorder,
        timers=timers,
        settings=pick(TrainerSettings, config, seed_steps=seed_steps),
        videos=videos,
        saver=_saver(config, run, replay, recorder),
        merger=build_merger(config, run, agent, replay, seed_steps, timers, recorder.announce, should_stop),
        should_stop=should_stop,
        breaking_off=breaking_off,
        system=SystemMetrics(device, lambda: replay.nbytes),
        trace=_trace(config, run, recorder, stack),
        progress=progress,
    )


def _saver(config: TrainConfig, run: Path, replay: ReplayBuffer, recorder: Recorder) -> Saver | NoSaver:
    if not config.save_agent:
        return NoSaver()
    return Saver(
        Checkpoints(run, config.save_keep),
        ReplaySegments(run / "replay", replay),
        to_mapping(config),
        config.save_freq,
        config.save_minutes,
        recorder.announce,
    )


def _trace(config: TrainConfig, run: Path, recorder: Recorder, stack: ExitStack) -> Callable[[int], None]:
    if not config.profile.trace:
        return no_trace
    trace = Trace(run / "trace.json", config.profile.at, config.profile.updates, recorder.announce)
    stack.callback(trace.close)
    return trace


def _network_and_weights(config: TrainConfig, envs: VectorEnv) -> tuple[NetworkSettings, dict[str, Any] | None]:
    """Return the settings of the networks, and the weights that they start from, if any.

    What is no size but part of the meaning of saved weights, such as the limits of the policy, is the checkpoint's.
    """
    sizes = {"observation_size": envs.observation_size, "action_size": envs.action_size}
    # One layer is two: an encoder always has a hidden layer.
    network = pick(NetworkSettings, config, **sizes, num_enc_layers=max(config.num_enc_layers, 2))
    if config.checkpoint is None:
        return network, None
    weights = load_weights(config.checkpoint)
    wanted = {name: value for name, value in asdict(network).items() if name not in NOT_SIZES}
    check_sizes(config.checkpoint, weights["network"], wanted)
    return NetworkSettings(**weights["network"]), weights


def build_evaluator(config: EvaluateConfig, stack: ExitStack) -> Evaluator:
    """Build an agent with the weights and sizes of `config.checkpoint`, and environments for it.

    Raises:
        ConfigError, TaskError, CheckpointError: a key does not fit what it names.
    """
    device = set_up_torch(config)
    seeds, timers = Seeds(config.seed), Timers(device=device)
    weights = load_weights(config.checkpoint)
    network = NetworkSettings(**weights["network"])
    envs = stack.enter_context(_make_eval_envs(config, min(config.num_envs, config.eval_episodes)))
    here = {"observation_size": envs.observation_size, "action_size": envs.action_size}
    check_sizes(config.checkpoint, weights["network"], here)
    compute = choose_compute(config, device, print)
    agent = _build_agent(config, network, None, compute, envs.max_episode_steps, seeds, device, timers, seeds)
    agent.load_weights(weights)
    return Evaluator(agent, envs, seeds, timers)


def _build_agent(
    config: TrainConfig | EvaluateConfig,
    network: NetworkSettings,
    learner: LearnerSettings | None,
    compute: Compute,
    episode_length: int,
    seeds: Seeds,
    device: torch.device,
    timers: Timers,
    init: Seeds,
) -> TDMPC2:
    # Large action spaces get two more iterations, as published.
    iterations = config.iterations + (2 if network.action_size >= 20 else 0)
    return TDMPC2(
        network,
        pick(PlannerSettings, config, iterations=iterations),
        learner,
        discount=discount_factor(episode_length, config.discount_denom, config.discount_min, config.discount_max),
        init_seed=init.integer(Stream.INIT),
        update_seed=seeds.integer(Stream.UPDATE),
        device=device,
        compute=compute,
        section=timers,
    )


def _num_eval_envs(config: TrainConfig, compute: Compute, device: torch.device) -> int:
    """Return how many evaluation environments to step together.

    On a CPU planning for ten takes almost as long as ten times planning for one. Planning for as many as in training
    spares compiling for another number.
    """
    most = config.num_envs if compute.compile and device.type == "cpu" else MAX_EVAL_ENVS
    return min(config.eval_episodes, most)


def _eval_envs_and_videos(
    config: TrainConfig, num_envs: int, run: Path, recorder: Recorder, timers: Timers, stack: ExitStack
) -> tuple[VectorEnv, Filming]:
    """Make the evaluation environments, and what films them; without OpenGL they are made all the same."""
    make = partial(_make_eval_envs, config, num_envs)
    if not config.save_video:
        return stack.enter_context(make()), NoVideos()
    try:
        envs = stack.enter_context(make(render=True))
    except RenderError as error:
        recorder.announce(f"warning: save_video=true: no videos will be made: {error}")
        return stack.enter_context(make()), NoVideos()
    folder, announce = run / "videos", recorder.announce
    return envs, Videos(folder, lambda: envs.render(0), envs.render_fps, announce, recorder.add_video, timers)


def _make_eval_envs(config: TrainConfig | EvaluateConfig, num_envs: int, render: bool = False) -> VectorEnv:
    return make_vector(config.task, num_envs, vector="sync", options=config.env, render=render)


def _seed_steps(config: TrainConfig, envs: VectorEnv) -> int:
    return max(1000, 5 * envs.max_episode_steps) if config.seed_steps is None else config.seed_steps


def _replay_shape(config: TrainConfig, envs: VectorEnv) -> dict[str, int]:
    return {
        "num_envs": config.num_envs,
        "guest_rings": config.guest_rings,
        "capacity": config.buffer_size,
        "observation_size": envs.observation_size,
        "action_size": envs.action_size,
    }


def _check_memory(config: TrainConfig, envs: VectorEnv, device: torch.device, recorder: Recorder) -> None:
    """Say how much memory the replay takes, on the device that learns from it, and refuse it if it cannot fit."""
    needed, free = bytes_needed(**_replay_shape(config, envs)), _free_bytes(device)
    guests = config.merge.guests
    shares = f", an equal share for each of {guests + 1} workers" if guests else ""
    recorder.announce(f"replay: {config.buffer_size:,} rows, {needed / 1e6:.0f} MB when full{shares}")
    if needed > free:
        raise ConfigError(
            f"buffer_size={config.buffer_size}: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        )


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
