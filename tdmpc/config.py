"""Every key of the command line: its type, its default, its sentence, and what is allowed.

Names and defaults are those that the authors of TD-MPC2 publish, as far as they have the key.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

from tdmpc.keys import ConfigError, Key, Section, key, keys_of, require, shown

MODEL_SIZES: dict[int, dict[str, int]] = {
    1: {"num_enc_layers": 2, "enc_dim": 256, "mlp_dim": 384, "latent_dim": 128, "num_q": 2},
    5: {"num_enc_layers": 2, "enc_dim": 256, "mlp_dim": 512, "latent_dim": 512, "num_q": 5},
    19: {"num_enc_layers": 3, "enc_dim": 1024, "mlp_dim": 1024, "latent_dim": 768, "num_q": 5},
    48: {"num_enc_layers": 4, "enc_dim": 1792, "mlp_dim": 1792, "latent_dim": 768, "num_q": 5},
    317: {"num_enc_layers": 5, "enc_dim": 4096, "mlp_dim": 4096, "latent_dim": 1376, "num_q": 8},
}
"""Sizes of the networks for each `model_size`, which is about the number of parameters in millions."""

FIXED = (
    *("task", "obs", "env", "num_envs", "episodic", "seed", "seed_steps", "steps_per_update", "buffer_size", "horizon"),
    *("model_size", "num_enc_layers", "enc_dim", "mlp_dim", "latent_dim", "num_q", "simnorm_dim", "num_bins"),
    *("vmin", "vmax", "log_std_min", "log_std_max", "save_agent", "checkpoint"),
    *("merge.strategy", "merge.worker", "merge.workers", "merge.control", "merge.every", "merge.start"),
    *("merge.exchange", "merge.share", "merge.shared_init", "merge.moments"),
)
"""Keys that a run keeps for good: its state, or that of its group, was made with them."""

UNSAFE_IN_A_NAME = re.compile(r"[^\w.+=-]+")


@dataclass(frozen=True, kw_only=True)
class Task(Section):
    """Task and environments."""

    task: str = key("walker-walk", "Task to solve: walker-walk (DMControl) or gym:HalfCheetah-v5 (Gymnasium).")
    obs: str = key("state", "What the agent observes: state.")
    env: Mapping[str, Any] = key({}, "Options for gymnasium.make, each written as env.option=value.")
    num_envs: int = key(1, "Number of environments that are stepped together.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.obs == "state", "obs", self.obs, "must be state; pixel observations are not supported yet")
        require(bool(re.search(r"\w", self.task)), "task", self.task, "must be the name of a task")


@dataclass(frozen=True, kw_only=True)
class Stepping(Section):
    """How the environments are stepped."""

    episodic: bool = key(False, "Whether episodes can terminate, so that the agent learns to predict it.")
    vector: str = key(
        "auto",
        "How they are stepped: sync (in this process), async (one process each), or auto.",
        choices=("auto", "sync", "async"),
    )


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """Training."""

    steps: int = key(10_000_000, "Length of the run in steps, counted over all environments.", ge=1)
    seed_steps: int | None = key(
        None, "Steps of random actions before learning starts; null takes max(1000, 5 episodes).", ge=0
    )
    eval_freq: int = key(50_000, "Steps between evaluations.", ge=1)
    steps_per_update: float = key(1.0, "Steps per update; 0.5 makes two updates per step.", gt=0)
    batch_size: int = key(256, "Number of slices in the batch of an update.", ge=1)
    buffer_size: int = key(1_000_000, "Rows that the replay buffer holds; an episode of L steps takes L+1.", ge=1)
    reward_coef: float = key(0.1, "Weight of the reward loss.", ge=0)
    value_coef: float = key(0.1, "Weight of the value loss.", ge=0)
    termination_coef: float = key(1.0, "Weight of the termination loss.", ge=0)
    consistency_coef: float = key(20.0, "Weight of the latent consistency loss.", ge=0)
    entropy_coef: float = key(1e-4, "Weight of the entropy in the loss of the policy prior.", ge=0)
    rho: float = key(0.5, "Factor by which a loss counts less with each step into the future.", gt=0, le=1)
    lr: float = key(3e-4, "Learning rate.", gt=0)
    enc_lr_scale: float = key(0.3, "Learning rate of the encoder, relative to lr.", gt=0)
    grad_clip_norm: float = key(20.0, "Norm to which gradients are clipped.", gt=0)
    dropout: float = key(0.01, "Dropout in the first layer of the Q networks.", ge=0, lt=1)
    tau: float = key(0.01, "Share of the way that the target Q networks move in an update.", gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Evaluation."""

    checkpoint: str | None = key(
        None, "Saved weights to start from: a run directory, a checkpoint, or a published file."
    )
    eval_episodes: int = key(10, "Number of episodes in an evaluation.", ge=1)


@dataclass(frozen=True, kw_only=True)
class Planning(Section):
    """Planning."""

    mpc: bool = key(True, "Plan every action; false takes it from the policy prior.")
    plan_every: int = key(1, "Number of actions that are taken from one plan; 1 plans anew at every step.", ge=1)
    horizon: int = key(3, "Number of steps planned ahead, and of the steps that a slice is long.", ge=1)
    iterations: int = key(
        6, "Iterations of a plan, to which 2 are added where actions have at least 20 dimensions.", ge=1
    )
    num_samples: int = key(512, "Number of trajectories tried in an iteration.", ge=1)
    num_elites: int = key(64, "Number of best trajectories that the next iteration follows.", ge=1)
    num_pi_trajs: int = key(24, "Number of the trajectories that come from the policy prior.", ge=0)
    min_std: float = key(0.05, "Least standard deviation of the sampled actions.", gt=0)
    max_std: float = key(2.0, "Largest standard deviation of the sampled actions, and the initial one.", gt=0)
    temperature: float = key(0.5, "How strongly better elites weigh more.", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most_all = f"must be at most num_samples ({self.num_samples})"
        require(self.num_elites <= self.num_samples, "num_elites", self.num_elites, at_most_all)
        require(self.num_pi_trajs <= self.num_samples, "num_pi_trajs", self.num_pi_trajs, at_most_all)
        at_most_horizon = f"must be at most horizon ({self.horizon})"
        require(self.plan_every <= self.horizon, "plan_every", self.plan_every, at_most_horizon)
        at_most_max = f"must be at most max_std ({self.max_std})"
        require(self.min_std <= self.max_std, "min_std", self.min_std, at_most_max)


@dataclass(frozen=True, kw_only=True)
class Discount(Section):
    """Discount."""

    discount_denom: float = key(5.0, "The discount looks ahead an episode's length divided by this.", gt=0)
    discount_min: float = key(0.95, "Least discount.", ge=0, le=1)
    discount_max: float = key(0.995, "Largest discount.", ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_most_max = f"must be at most discount_max ({self.discount_max})"
        require(self.discount_min <= self.discount_max, "discount_min", self.discount_min, at_most_max)


@dataclass(frozen=True, kw_only=True)
class ActorCritic(Section):
    """Actor and critic."""

    log_std_min: float = key(-10.0, "Least log standard deviation of the policy prior.")
    log_std_max: float = key(2.0, "Largest log standard deviation of the policy prior.")
    num_bins: int = key(101, "Number of bins over which rewards and values are predicted.", ge=2)
    vmin: float = key(-10.0, "Lowest bin, in symlog space.")
    vmax: float = key(10.0, "Highest bin, in symlog space.")

    def __post_init__(self) -> None:
        super().__post_init__()
        below_max = f"must be below log_std_max ({self.log_std_max})"
        require(self.log_std_min < self.log_std_max, "log_std_min", self.log_std_min, below_max)
        require(self.vmin < self.vmax, "vmin", self.vmin, f"must be below vmax ({self.vmax})")


@dataclass(frozen=True, kw_only=True)
class Architecture(Section):
    """Architecture (null takes the value of the model size).

    Once made, the object holds the sizes that were taken.
    """

    model_size: int = key(5, "Size of the agent, in millions of parameters.", choices=tuple(MODEL_SIZES))
    num_enc_layers: int = key(None, "Number of layers of the encoder.", ge=1)
    enc_dim: int = key(None, "Width of the encoder.", ge=1)
    mlp_dim: int = key(None, "Width of the other networks.", ge=1)
    latent_dim: int = key(None, "Size of the latent state.", ge=1)
    num_q: int = key(None, "Number of Q networks.", ge=2)
    simnorm_dim: int = key(8, "Size of the groups in which SimNorm normalises the latent state.", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in MODEL_SIZES[self.model_size].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)
        multiple = f"must be a multiple of simnorm_dim ({self.simnorm_dim})"
        require(self.latent_dim % self.simnorm_dim == 0, "latent_dim", self.latent_dim, multiple)


@dataclass(frozen=True, kw_only=True)
class Machine(Section):
    """Machine and randomness."""

    seed: int = key(1, "Seed of everything that is random.", ge=0)
    device: str = key("auto", "Where to compute; auto takes cuda if there is one.", choices=("auto", "cpu", "cuda"))
    threads: int | str = key(
        "auto",
        "Number of CPU threads of torch; auto divides the cores among workers, and leaves it to torch without any.",
        ge=1,
        le=1024,
        words=("auto",),
    )
    compile: str = key(
        "auto",
        "Whether to compile plans and updates; auto does where the run is long enough to gain by it.",
        choices=("auto", "true", "false"),
    )
    compile_mode: str | None = key(
        None,
        "Mode of torch.compile; null takes reduce-overhead (CUDA graphs) on a GPU, default on a CPU.",
        choices=("default", "reduce-overhead", "max-autotune"),
    )
    precision: str = key(
        "fp32",
        "Precision of the products in plans and updates; auto takes bf16 where it is faster.",
        choices=("auto", "fp32", "bf16"),
    )
    update_precision: str | None = key(
        None, "The same for updates alone; null takes precision.", choices=("auto", "fp32", "bf16")
    )

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", shown(self.compile))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Recording(Section):
    """What the run leaves behind."""

    run_root: str = key("runs", "Directory in which runs are kept.")
    exp_name: str = key("default", "Name that sets runs of one task apart.")
    resume: str = key(
        "auto",
        "What to continue: auto (the run of the same name, if there is one), never, or another run directory.",
    )
    overwrite: bool = key(False, "Whether to delete the run of the same name, if there is one, and start anew.")
    log_freq: int = key(1000, "Steps between log lines.", ge=1)
    save_agent: bool = key(True, "Whether to save checkpoints, from which the run continues exactly.")
    save_freq: int | None = key(None, "Steps between checkpoints; null saves by the clock alone.", ge=1)
    save_minutes: float = key(10.0, "Minutes between checkpoints.", gt=0)
    save_keep: int = key(2, "Number of newest checkpoints that are kept.", ge=1)
    save_video: bool = key(False, "Whether to record the first episode of every evaluation as a video.")
    enable_wandb: bool = key(False, "Whether to log to Weights & Biases.")
    wandb_project: str = key("tdmpc", "Project of Weights & Biases that the run belongs to.")
    wandb_entity: str | None = key(None, "User or team that owns the project; null leaves it to Weights & Biases.")
    wandb_silent: bool = key(False, "Whether Weights & Biases keeps its own messages off the console.")

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = not UNSAFE_IN_A_NAME.search(self.exp_name) and not self.exp_name.startswith(".")
        allowed = "must consist of letters, digits and any of _ . + = -, and not start with a dot"
        require(plain, "exp_name", self.exp_name, allowed)


@dataclass(frozen=True, kw_only=True)
class Log(Section):
    """Where the log goes."""

    prefix = "log."

    console: str = key(
        "auto",
        "How the console shows it: plain (lines only, no bar, no colour), or auto (plain unless in a terminal).",
        choices=("auto", "plain"),
    )
    tensorboard: bool = key(True, "Whether to write TensorBoard files into the run directory.")


@dataclass(frozen=True, kw_only=True)
class Profile(Section):
    """Profile of a few updates."""

    prefix = "profile."

    trace: bool = key(False, "Whether to write a Chrome trace and print the operators that take longest.")
    at: int = key(100, "Update at which the trace begins.", ge=0)
    updates: int = key(5, "Number of updates in the trace.", ge=1)


@dataclass(frozen=True, kw_only=True)
class Merge(Section):
    """Merging of workers that train side by side."""

    prefix = "merge."

    strategy: str = key(
        "none",
        "What becomes of the weights when workers meet; each is explained with its preset.",
        choices=("none", "mean", "nesterov", "elastic", "weighted"),
    )
    worker: int = key(0, "Number of this worker, from 0; torchrun gives every process its own.", ge=0)
    workers: int | None = key(
        None, "Number of workers; null takes that of the multirun or of torchrun, and else it must be given.", ge=1
    )
    control: bool = key(True, "Whether worker 0 trains alone, for comparison: it neither merges nor publishes.")
    every: int = key(2500, "Steps of this worker between rounds of merging.", ge=1)
    start: int | None = key(
        None, "Step from which rounds are counted, the first being `every` steps later; null takes seed_steps.", ge=0
    )
    exchange: str = key(
        "files",
        "How workers meet: files (in a folder beside their runs), or distributed (the processes of one torchrun).",
        choices=("files", "distributed"),
    )
    share: str = key(
        "weights",
        "What workers share: weights, experience (finished episodes go into the replays of the others), or both.",
        choices=("weights", "experience", "both"),
    )
    sync: bool = key(
        False, "Whether a round waits for that of all others; false takes what is there, distributed always waits."
    )
    timeout: float = key(60.0, "Seconds after which others are not waited for any longer.", gt=0)
    max_age: int | None = key(
        None, "Steps that another's weights may be behind, where nobody waits; null takes twice `every`.", ge=0
    )
    shared_init: bool = key(True, "Whether all workers begin with the same weights; all else differs between them.")
    moments: bool = key(False, "Whether the moments of the optimisers are merged as well.")
    lr: float = key(0.7, "Learning rate of nesterov.", gt=0)
    momentum: float = key(0.9, "Momentum of nesterov.", ge=0, lt=1)
    alpha: float = key(0.5, "Share of the way to the mean that elastic goes.", gt=0, le=1)
    temperature: float = key(
        1.0, "Standard deviations of the return that are a factor of e in weight, in weighted.", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.merges:
            return
        if self.workers is None:
            raise ConfigError(
                f"merge.workers: must be given with merge.strategy={self.strategy}, as in merge.workers=3, except in a "
                "multirun over merge.worker and under torchrun"
            )
        below_all = f"must be below merge.workers ({self.workers})"
        require(self.worker < self.workers, "merge.worker", self.worker, below_all)

    @property
    def merges(self) -> bool:
        """Whether this run is one of a group of workers."""
        return self.strategy != "none"

    @property
    def is_control(self) -> bool:
        """Whether this worker is the one that trains alone."""
        return self.merges and self.control and self.worker == 0

    @property
    def members(self) -> list[int]:
        """Numbers of the workers that merge."""
        return list(range(int(self.control), self.workers or 0)) if self.merges else []

    @property
    def guests(self) -> int:
        """Number of workers whose episodes come into the replay of this one."""
        return len(self.members) - 1 if self.share != "weights" and self.merges and not self.is_control else 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    Task, Stepping, Training, Evaluation, Planning, Discount, ActorCritic, Architecture, Machine, Recording
):
    """Everything that scripts/train.py is told."""

    log: Log = Log()
    profile: Profile = Profile()
    merge: Merge = Merge()

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_a_step = f"must be at least num_envs ({self.num_envs}), the steps that environments take together"
        enough = not self.merge.merges or self.merge.every >= self.num_envs
        require(enough, "merge.every", self.merge.every, at_least_a_step)
        least = (self.num_envs + self.guest_rings) * (self.horizon + 1)
        workers = f" * {1 + self.merge.guests} workers that share" if self.guest_rings else ""
        allowed = f"must be at least num_envs * (horizon + 1){workers} = {least}, to hold one slice of each environment"
        require(self.buffer_size >= least, "buffer_size", self.buffer_size, allowed)
        if self.seed_steps is not None:
            least = self.num_envs * self.horizon
            allowed = f"must be at least num_envs * horizon = {least}, for learning to have a slice to start from"
            require(self.seed_steps >= least, "seed_steps", self.seed_steps, allowed)

    @property
    def guest_rings(self) -> int:
        """Number of rings of the replay for episodes of others, each of whom gets as much room as this worker."""
        return self.num_envs * self.merge.guests


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Evaluation, Task, Planning, Discount, Machine):
    """Everything that scripts/evaluate.py is told; the sizes of the agent are those of the checkpoint."""

    checkpoint: str = key(MISSING, "Saved weights to evaluate: a run directory, a checkpoint, or a published file.")
    num_envs: int = key(10, "Number of episodes that run side by side.", ge=1)
    csv: str | None = key(None, "New CSV file with a line for every episode; null writes none.")
    save_video: bool = key(False, "Whether to record the first episode as a video.")
    video_dir: str = key("videos", "Directory of the video, which is named after the steps of the weights.")


def run_directory(config: TrainConfig) -> Path:
    """Return where a run is kept, `<run_root>/<task>/<exp_name>/seed-<seed>[/worker-<i>]`, the last where it merges.

    Characters of the task that do not belong in a path become dashes: `gym:HalfCheetah-v5` is kept in
    `gym-HalfCheetah-v5`.
    """
    task = UNSAFE_IN_A_NAME.sub("-", config.task).strip("-.")
    directory = Path(config.run_root) / task / config.exp_name / f"seed-{config.seed}"
    return directory / f"worker-{config.merge.worker}" if config.merge.merges else directory


BENCHMARK_LISTS: dict[str, tuple[Any, ...]] = {
    "ops": ("plan", "update", "sample", "add", "env_step", "overlap", "merge", "save"),
    "model_sizes": (1, 5),
    "num_envs": (1, 4),
}
"""What null stands for, in the keys of `Benchmark` and `BenchmarkConfig` that are lists."""


@dataclass(frozen=True, kw_only=True)
class Lists(Section):
    """A section some of whose keys are lists: those whose type is a tuple.

    Such a key takes a list, or one value for a list of it. Once made, the object holds the list that null stands for,
    which is that of its name in `when_null`.
    """

    when_null: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __post_init__(self) -> None:
        # `Section` has no lists, but leaves a null that is a default alone.
        lists = [member for member in fields(self) if get_origin(member.type) is tuple]
        given = {member.name: getattr(self, member.name) for member in lists}
        for member in lists:
            object.__setattr__(self, member.name, None)
        super().__post_init__()
        for member in lists:
            one = replace(keys_of(type(self))[member.name], type=get_args(member.type)[0], default=())
            values = _listed(given[member.name], self.when_null[member.name], one)
            object.__setattr__(self, member.name, values)


@dataclass(frozen=True, kw_only=True)
class Benchmark(Lists):
    """What is measured and compared."""

    when_null = BENCHMARK_LISTS

    suite: str = key("ops", "What to measure: ops (the operations that training consists of).", choices=("ops",))
    ops: tuple[str, ...] = key(None, "List of the operations to time; null takes all.", choices=BENCHMARK_LISTS["ops"])
    model_sizes: tuple[int, ...] = key(
        None, "List of sizes of the agent, in millions of parameters; null takes 1 and 5.", choices=tuple(MODEL_SIZES)
    )
    repeats: int = key(100, "How often an operation is timed at most, after two calls that do not count.", ge=3)
    budget_s: float = key(5.0, "Seconds after which an operation that was timed 3 times is not timed again.", gt=0)
    out: str | None = key(None, "JSON file to write; null takes a new one in runs/benchmark.")
    baseline: str | None = key(None, "Earlier JSON file to compare with; null compares with none.")
    slower: float = key(1.1, "Ratio to the median in the baseline from which an operation counts as slower.", ge=1)
    fail_if_slower: bool = key(False, "Whether to exit with code 1 if an operation is slower than in the baseline.")

    def __post_init__(self) -> None:
        super().__post_init__()
        required = not self.fail_if_slower or self.baseline is not None
        require(required, "fail_if_slower", self.fail_if_slower, "must be false without a baseline")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(Benchmark, Task, Stepping, Training, Planning, Machine):
    """Everything that scripts/benchmark.py is told; of the keys of training, those count that change a time."""

    num_envs: tuple[int, ...] = key(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "List of numbers of environments that are stepped together; null takes 1 and 4.", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for num_envs in self.num_envs:
            self.train_config(self.model_sizes[0], num_envs)  # checks the rules of training

    def train_config(self, model_size: int, num_envs: int) -> TrainConfig:
        """Return the configuration of a run with an agent of one size and so many environments."""
        shared = {member.name for member in fields(self)} & {member.name for member in fields(TrainConfig)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        # What a run makes besides, it makes as little of as it can.
        values |= {"model_size": model_size, "num_envs": num_envs, "vector": "sync", "eval_episodes": 1}
        return TrainConfig(**values)


def _listed(value: Any, when_null: tuple[Any, ...], one: Key) -> tuple[Any, ...]:
    """Convert every value of a list as `one` key would; a value that is no list is a list of it."""
    if value is None:
        return when_null
    values = value if isinstance(value, list | tuple) else [value]
    require(len(values) > 0, one.name, [], "must not be empty")
    return tuple(dict.fromkeys(one.convert(item) for item in values))
