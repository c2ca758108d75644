"""The agent: planning, updating, updating while the environments step, saving."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from envs import make_vector
from tdmpc.agent.agent import TDMPC2
from tdmpc.benchmarks.bench import Bench
from tdmpc.benchmarks.env_ops import Stepper
from tdmpc.benchmarks.flops import count_flop
from tdmpc.benchmarks.merge_ops import time_merge
from tdmpc.benchmarks.replay_ops import fill
from tdmpc.benchmarks.results import Record
from tdmpc.benchmarks.timing import Timed
from tdmpc.compose import build_trainer
from tdmpc.keys import ConfigError
from tdmpc.replay_segments import ReplaySegments
from tdmpc.seeding import Seeds, Stream
from tdmpc.telemetry.recorder import Recorder
from tdmpc.training.checkpoint import Checkpoints
from tdmpc.training.saver import Saver
from tdmpc.training.trainer import Trainer

Op = Callable[[Bench, int, Trainer], Iterator[Record]]


class WarningsAloud(Recorder):
    """Print the warnings of building a run, and nothing else of what it says."""

    def __init__(self) -> None:
        super().__init__([])

    def announce(self, text: str) -> None:
        """Print a warning."""
        if text.startswith("warning"):
            print(text, flush=True)


@contextmanager
def agent_of_size(bench: Bench, model_size: int) -> Iterator[Trainer]:
    """Build a trainer as a run has it, its agent of one size, its replay full; it has never trained."""
    config = bench.config.train_config(model_size, num_envs=1)
    with ExitStack() as stack:
        trainer = build_trainer(config, bench.folder, WarningsAloud(), stack)
        fill(trainer.replay, config.buffer_size, 1, trainer.collector.envs)
        yield trainer


def time_plan(bench: Bench, model_size: int, trainer: Trainer) -> Iterator[Record]:
    """Time how the agent acts in training, for every number of environments."""
    variant = None if bench.config.mpc else "policy"
    for num_envs in bench.config.num_envs:
        # A run has one number of environments; the compiler should not count the others against it.
        torch.compiler.reset()
        act = _acting(trainer.agent, num_envs, Seeds(bench.config.seed))
        timing = bench.stopwatch.time(act)
        yield bench.record("plan", timing, count_flop(act), model_size=model_size, num_envs=num_envs, variant=variant)


def time_update(bench: Bench, model_size: int, trainer: Trainer) -> Iterator[Record]:
    """Time an update."""
    update = _updating(bench, trainer)
    timing = bench.stopwatch.time(update)
    yield bench.record("update", timing, count_flop(update), model_size=model_size)


def time_overlap(bench: Bench, model_size: int, trainer: Trainer) -> Iterator[Record]:
    """Time a step of environments in processes of their own and an update: by themselves, then both at once.

    The variants: `step`; `update`; `both`, an update between beginning and finishing a step; `exposed`, what begin
    and end take in there. What `both` hides is the median, over the rounds, of what it saves against one after the
    other; it counts an update that is slower while environments step, and has the noise of two updates. `exposed`
    has neither.
    """
    config, update = bench.config, _updating(bench, trainer)
    for num_envs in config.num_envs:
        with make_vector(config.task, num_envs, vector="async", options=config.env) as envs:
            stepper = Stepper(envs, Seeds(config.seed))
            alone = [Timed(stepper.step, stepper.prepare), Timed(update)]
            at_once = [Timed(stepper.send, stepper.prepare), Timed(update), Timed(stepper.wait)]
            step, learn, send, meanwhile, wait = bench.stopwatch.time_in_turn([*alone, *at_once])
        both, exposed = send + meanwhile + wait, send + wait
        saved = np.array((step + learn).samples_s) - np.array(both.samples_s)
        hidden_s = float(np.median(saved))
        hidden = {"hidden_s": hidden_s, "hidden_frac": hidden_s / step.median_s}
        for variant, timing in {"step": step, "update": learn, "both": both, "exposed": exposed}.items():
            more: dict[str, Any] = hidden if variant == "both" else {}
            yield bench.record("overlap", timing, model_size=model_size, num_envs=num_envs, variant=variant, **more)


def time_save(bench: Bench, model_size: int, trainer: Trainer) -> Iterator[Record]:
    """Time saving everything, the full replay too, where nothing was saved before."""
    folder = bench.folder / "run"
    failures: list[str] = []

    def new_saver() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        segments = ReplaySegments(folder / "replay", trainer.replay)
        trainer.saver = Saver(Checkpoints(folder, keep=1), segments, {}, None, np.inf, failures.append)

    def save() -> None:
        if not trainer.saver.save(trainer):
            raise ConfigError(f"ops=save: {failures[-1]}")

    timing = bench.stopwatch.time(save, new_saver)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    yield bench.record("save", timing, model_size=model_size, bytes=size)


AGENT_OPS: Mapping[str, Op] = {
    "plan": time_plan,
    "update": time_update,
    "overlap": time_overlap,
    "merge": time_merge,
    "save": time_save,
}


def _acting(agent: TDMPC2, num_envs: int, seeds: Seeds) -> Callable[[], None]:
    obs = torch.randn(num_envs, agent.network.observation_size, device=agent.device)
    first = torch.zeros(num_envs, dtype=torch.bool, device=agent.device)
    state = agent.initial_state(num_envs, seeds.integer(Stream.PLANNER))

    def act() -> None:
        nonlocal state
        _, state = agent.act(obs, state, first, explore=True)

    return act


def _updating(bench: Bench, trainer: Trainer) -> Callable[[], object]:
    batch = trainer.replay.sample(bench.config.batch_size)
    return lambda: trainer.agent.update(batch)
