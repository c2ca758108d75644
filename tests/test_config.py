import dataclasses
import math
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from tdmpc.config import MODEL_SIZES, EvaluateConfig, Log, Profile, TrainConfig, run_directory
from tdmpc.keys import ConfigError, Section, defaults, from_mapping, key, keys_of, require, sections, to_yaml

PUBLISHED_DEFAULTS = {
    "task": "walker-walk",
    "obs": "state",
    "episodic": False,
    "checkpoint": None,
    "eval_episodes": 10,
    "eval_freq": 50_000,
    "steps": 10_000_000,
    "batch_size": 256,
    "reward_coef": 0.1,
    "value_coef": 0.1,
    "termination_coef": 1,
    "consistency_coef": 20,
    "rho": 0.5,
    "lr": 3e-4,
    "enc_lr_scale": 0.3,
    "grad_clip_norm": 20,
    "tau": 0.01,
    "discount_denom": 5,
    "discount_min": 0.95,
    "discount_max": 0.995,
    "buffer_size": 1_000_000,
    "exp_name": "default",
    "mpc": True,
    "iterations": 6,
    "num_samples": 512,
    "num_elites": 64,
    "num_pi_trajs": 24,
    "horizon": 3,
    "min_std": 0.05,
    "max_std": 2,
    "temperature": 0.5,
    "log_std_min": -10,
    "log_std_max": 2,
    "entropy_coef": 1e-4,
    "num_bins": 101,
    "vmin": -10,
    "vmax": 10,
    "model_size": 5,
    "num_enc_layers": 2,
    "enc_dim": 256,
    "mlp_dim": 512,
    "latent_dim": 512,
    "num_q": 5,
    "dropout": 0.01,
    "simnorm_dim": 8,
    "save_agent": True,
    "save_freq": None,
    "save_minutes": 10.0,
    "save_keep": 2,
    "resume": "auto",
    "seed": 1,
}
OUR_DEFAULTS = {
    "seed_steps": None,
    "num_envs": 1,
    "steps_per_update": 1,
    "vector": "auto",
    "env": {},
    "device": "auto",
    "threads": "auto",
    "compile": "auto",
    "compile_mode": None,
    "precision": "fp32",
    "plan_every": 1,
    "update_precision": None,
    "log_freq": 1000,
    "overwrite": False,
    "run_root": "runs",
    "save_video": False,
    "enable_wandb": False,
    "wandb_project": "tdmpc",
    "wandb_entity": None,
    "wandb_silent": False,
    "log": {"console": "auto", "tensorboard": True},
    "profile": {"trace": False, "at": 100, "updates": 5},
    "merge": {
        "strategy": "none",
        "worker": 0,
        "workers": None,
        "control": True,
        "every": 2500,
        "start": None,
        "exchange": "files",
        "share": "weights",
        "sync": False,
        "timeout": 60.0,
        "max_age": None,
        "shared_init": True,
        "moments": False,
        "lr": 0.7,
        "momentum": 0.9,
        "alpha": 0.5,
        "temperature": 1.0,
    },
}


MEAN = {"merge.strategy": "mean", "merge.workers": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range(Section):
    """Range."""

    prefix = "range."

    low: float = key(0.0, "Least value.")
    high: float | None = key(1.0, "Largest value.")
    options: Mapping[str, int] = key({}, "Options of the range.")

    def __post_init__(self):
        super().__post_init__()
        require(self.low < self.high, "range.low", self.low, f"must be below range.high ({self.high})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Section):
    """Before and after the group."""

    low: int = key(1, "A key whose name is also one of the group.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(Plain):
    """A configuration with a group."""

    range: Range = Range()


def test_the_defaults_are_the_published_ones_and_ours():
    assert dataclasses.asdict(TrainConfig()) == PUBLISHED_DEFAULTS | OUR_DEFAULTS


@pytest.mark.parametrize(
    ("model_size", "enc_dim", "mlp_dim", "latent_dim", "num_enc_layers", "num_q"),
    [
        (1, 256, 384, 128, 2, 2),
        (5, 256, 512, 512, 2, 5),
        (19, 1024, 1024, 768, 3, 5),
        (48, 1792, 1792, 768, 4, 5),
        (317, 4096, 4096, 1376, 5, 8),
    ],
)
def test_model_sizes_are_the_published_ones(model_size, enc_dim, mlp_dim, latent_dim, num_enc_layers, num_q):
    config = TrainConfig(model_size=model_size)
    assert (config.enc_dim, config.mlp_dim, config.latent_dim) == (enc_dim, mlp_dim, latent_dim)
    assert (config.num_enc_layers, config.num_q) == (num_enc_layers, num_q)


def test_a_given_size_wins_over_the_table():
    config = TrainConfig(model_size=1, mlp_dim=100)
    assert config.mlp_dim == 100
    assert config.enc_dim == MODEL_SIZES[1]["enc_dim"]


@pytest.mark.parametrize("config_class", [TrainConfig, EvaluateConfig])
def test_every_key_belongs_to_a_section_and_has_one_sentence(config_class):
    declared = keys_of(config_class)
    top = {name.partition(".")[0] for name in declared}
    assert top == {field.name for field in dataclasses.fields(config_class)}
    assert len(declared) == sum(len(keys) for keys in sections(config_class).values())
    for name, declaration in declared.items():
        assert re.fullmatch(r"[A-Z][^$]*[^.]\.", declaration.sentence), name
        assert ". " not in declaration.sentence, name


@pytest.mark.parametrize("config_class", [TrainConfig, EvaluateConfig])
def test_every_default_has_the_type_of_its_key(config_class):
    config = from_mapping(config_class, {"checkpoint": "agent.pt"})
    for name, declaration in keys_of(config_class).items():
        if declaration.default is not None:
            assert type(declaration.default) is type(attrgetter(name)(config)), name


def test_evaluation_shares_its_keys_with_training():
    assert keys_of(EvaluateConfig).keys() - keys_of(TrainConfig).keys() == {"csv", "video_dir"}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("steps", 1e6, 1_000_000),
        ("steps", 5, 5),
        ("seed", 2**70, 2**70),
        ("seed", 0.0, 0),
        ("seed_steps", 3, 3),
        ("seed_steps", None, None),
        ("steps_per_update", 0.5, 0.5),
        ("steps_per_update", 4, 4.0),
        ("consistency_coef", 0, 0.0),
        ("mpc", False, False),
        ("threads", "auto", "auto"),
        ("threads", 2.0, 2),
        ("latent_dim", 1024.0, 1024),
        ("latent_dim", None, 512),
        ("checkpoint", "some where/agent.pt", "some where/agent.pt"),
        ("exp_name", 2, "2"),
        ("exp_name", "lr=0.1+a_b-c", "lr=0.1+a_b-c"),
        ("run_root", "/data/my runs", "/data/my runs"),
        ("env", {"a": {"b": 1}}, {"a": {"b": 1}}),
        ("num_pi_trajs", 0, 0),
        ("num_elites", 512, 512),
        ("profile.at", 1e3, 1000),
        ("profile.at", 0, 0),
        ("log.tensorboard", False, False),
        ("wandb_entity", None, None),
        ("wandb_project", 7, "7"),
    ],
)
def test_a_value_becomes_the_type_of_its_key(name, given, expected):
    value = attrgetter(name)(from_mapping(TrainConfig, {name: given}))
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # Types.
        ({"steps": "abc"}, "steps=abc: must be a whole number of at least 1"),
        ({"steps": ""}, "steps=: must be a whole number of at least 1"),
        ({"steps": "two\nlines"}, r"steps='two\nlines': must be a whole number of at least 1"),
        ({"steps": None}, "steps=null: must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps=1.5: must be a whole number of at least 1"),
        ({"steps": True}, "steps=true: must be a whole number of at least 1"),
        ({"steps": math.inf}, "steps=inf: must be a whole number of at least 1"),
        ({"steps": {"a": 1}}, "steps={'a': 1}: must be a whole number of at least 1"),
        ({"threads": "all"}, "threads=all: must be a whole number of at least 1 and of at most 1024, or auto"),
        ({"threads": None}, "threads=null: must be a whole number of at least 1 and of at most 1024, or auto"),
        ({"threads": "2"}, "threads=2: must be a whole number of at least 1 and of at most 1024, or auto"),
        ({"threads": 0}, "threads=0: must be a whole number of at least 1 and of at most 1024, or auto"),
        ({"episodic": 3}, "episodic=3: must be true or false"),
        ({"mpc": "maybe"}, "mpc=maybe: must be true or false"),
        ({"lr": "fast"}, "lr=fast: must be a finite number above 0"),
        ({"lr": math.nan}, "lr=nan: must be a finite number above 0"),
        ({"vmin": -math.inf}, "vmin=-inf: must be a finite number"),
        ({"tau": False}, "tau=false: must be a finite number above 0 and of at most 1"),
        ({"task": None}, "task=null: must be a text that is not empty"),
        ({"task": [1]}, "task=[1]: must be a text that is not empty"),
        ({"exp_name": True}, "exp_name=true: must be a text that is not empty"),
        ({"run_root": " "}, "run_root= : must be a text that is not empty"),
        ({"env": 5}, "env=5: must be options, each written as key.option=value"),
        ({"env": None}, "env=null: must be options, each written as key.option=value"),
        ({"env": {1: 2}}, "env={1: 2}: must be options, each written as key.option=value"),
        # Bounds.
        ({"num_envs": 0}, "num_envs=0: must be a whole number of at least 1"),
        ({"steps": -1}, "steps=-1: must be a whole number of at least 1"),
        ({"seed_steps": -1}, "seed_steps=-1: must be a whole number of at least 0, or null"),
        ({"horizon": 0}, "horizon=0: must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
        ({"num_bins": 1}, "num_bins=1: must be a whole number of at least 2"),
        ({"num_q": 1}, "num_q=1: must be a whole number of at least 2, or null"),
        ({"seed": -1}, "seed=-1: must be a whole number of at least 0"),
        ({"log_freq": 0}, "log_freq=0: must be a whole number of at least 1"),
        ({"steps_per_update": 0}, "steps_per_update=0: must be a finite number above 0"),
        ({"dropout": 1}, "dropout=1: must be a finite number of at least 0 and below 1"),
        # Choices.
        ({"model_size": 7}, "model_size=7: must be one of 1, 5, 19, 48, 317"),
        ({"vector": "fast"}, "vector=fast: must be one of auto, sync, async"),
        ({"device": "tpu"}, "device=tpu: must be one of auto, cpu, cuda"),
        ({"obs": "rgb"}, "obs=rgb: must be state; pixel observations are not supported yet"),
        # Keys that go together.
        ({"num_elites": 600}, "num_elites=600: must be at most num_samples (512)"),
        ({"num_pi_trajs": 600}, "num_pi_trajs=600: must be at most num_samples (512)"),
        ({"min_std": 3}, "min_std=3.0: must be at most max_std (2.0)"),
        ({"log_std_min": 2}, "log_std_min=2.0: must be below log_std_max (2.0)"),
        ({"vmin": 10}, "vmin=10.0: must be below vmax (10.0)"),
        ({"discount_min": 0.999}, "discount_min=0.999: must be at most discount_max (0.995)"),
        ({"latent_dim": 100}, "latent_dim=100: must be a multiple of simnorm_dim (8)"),
        ({"simnorm_dim": 7}, "latent_dim=512: must be a multiple of simnorm_dim (7)"),
        (
            {"buffer_size": 15, "num_envs": 4},
            "buffer_size=15: must be at least num_envs * (horizon + 1) = 16, to hold one slice of each environment",
        ),
        # Workers that merge.
        ({"merge.strategy": "median"}, "merge.strategy=median: must be one of none, mean, nesterov, elastic, weighted"),
        ({"merge.every": 0}, "merge.every=0: must be a whole number of at least 1"),
        (
            MEAN | {"merge.every": 3, "num_envs": 4},
            "merge.every=3: must be at least num_envs (4), the steps that environments take together",
        ),
        (MEAN | {"merge.worker": 3}, "merge.worker=3: must be below merge.workers (3)"),
        (MEAN | {"merge.worker": -1}, "merge.worker=-1: must be a whole number of at least 0"),
        (
            MEAN | {"merge.workers": None},
            "merge.workers: must be given with merge.strategy=mean, as in merge.workers=3, except in a multirun over "
            "merge.worker and under torchrun",
        ),
        (MEAN | {"merge.share": "replay"}, "merge.share=replay: must be one of weights, experience, both"),
        (
            MEAN | {"merge.share": "both", "merge.worker": 1, "buffer_size": 31, "num_envs": 4},
            "buffer_size=31: must be at least num_envs * (horizon + 1) * 2 workers that share = 32, "
            "to hold one slice of each environment",
        ),
        (MEAN | {"merge.exchange": "post"}, "merge.exchange=post: must be one of files, distributed"),
        (MEAN | {"merge.timeout": 0}, "merge.timeout=0: must be a finite number above 0"),
        (MEAN | {"merge.max_age": -1}, "merge.max_age=-1: must be a whole number of at least 0, or null"),
        (MEAN | {"merge.lr": 0}, "merge.lr=0: must be a finite number above 0"),
        (MEAN | {"merge.momentum": 1}, "merge.momentum=1: must be a finite number of at least 0 and below 1"),
        (MEAN | {"merge.alpha": 1.5}, "merge.alpha=1.5: must be a finite number above 0 and of at most 1"),
        (MEAN | {"merge.temperature": 0}, "merge.temperature=0: must be a finite number above 0"),
        # Names that become paths.
        ({"task": "../.."}, "task=../..: must be the name of a task"),
        *(
            (
                {"exp_name": name},
                f"exp_name={name}: must consist of letters, digits and any of _ . + = -, and not start with a dot",
            )
            for name in ("a/b", "..", "../a", "a b", r"a\b", ".hidden")
        ),
        # Names of keys.
        ({"num_env": 2}, "num_env: no such key; close to it: num_envs, num_q, num_bins"),
        ({"xyzzy": 2}, "xyzzy: no such key; --help lists all keys"),
        # Groups of keys.
        ({"log": {"console": "bar"}}, "log.console=bar: must be one of auto, plain"),
        ({"log.console": "bar"}, "log.console=bar: must be one of auto, plain"),
        ({"log": {"console": None}}, "log.console=null: must be one of auto, plain"),
        ({"log": {"console": {"a": 1}}}, "log.console={'a': 1}: must be one of auto, plain"),
        ({"log": {"tensorboard": 1}}, "log.tensorboard=1: must be true or false"),
        ({"profile": {"at": -1}}, "profile.at=-1: must be a whole number of at least 0"),
        ({"profile": {"updates": 0}}, "profile.updates=0: must be a whole number of at least 1"),
        ({"log": 3}, "log: no such key; close to it: log.console, log.tensorboard"),
        ({"log": None}, "log: no such key; close to it: log.console, log.tensorboard"),
        ({"log": {"consol": "plain"}}, "log.consol: no such key; close to it: log.console"),
        ({"log": {1: 2}}, "log.1: no such key; --help lists all keys"),
        ({"log.console.a": 2}, "log.console.a: no such key; close to it: log.console"),
        ({"console": "plain"}, "console: no such key; close to it: log.console"),
        ({"profil": {"at": 1}}, "profil: no such key; close to it: profile.at, profile.trace"),
        ({"wandb_project": None}, "wandb_project=null: must be a text that is not empty"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as refusal:
        from_mapping(TrainConfig, given)
    assert str(refusal.value) == message


def test_evaluation_needs_a_checkpoint():
    with pytest.raises(ConfigError) as refusal:
        from_mapping(EvaluateConfig, {})
    assert (
        str(refusal.value)
        == "checkpoint: must be given; Saved weights to evaluate: a run directory, a checkpoint, or a published file."
    )


def test_evaluation_does_not_know_the_keys_of_training():
    with pytest.raises(ConfigError, match="batch_size: no such key"):
        from_mapping(EvaluateConfig, {"checkpoint": "agent.pt", "batch_size": 2})


def test_a_config_is_checked_whoever_makes_it():
    with pytest.raises(ConfigError, match="horizon=0"):
        TrainConfig(horizon=0)
    with pytest.raises(ConfigError, match="horizon=0"):
        dataclasses.replace(TrainConfig(), horizon=0)


def test_a_config_cannot_be_changed():
    for config, name in ((TrainConfig(), "seed"), (TrainConfig().profile, "at")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 2)


@pytest.mark.parametrize("make", [Log, lambda **keys: TrainConfig(log=keys)])
def test_a_group_names_its_keys_in_full_whoever_makes_it(make):
    with pytest.raises(ConfigError, match=r"^log\.console=bar: must be one of auto, plain$"):
        make(console="bar")


@pytest.mark.parametrize("value", [3, None, Profile()])
def test_only_its_own_class_or_its_keys_make_a_group(value):
    with pytest.raises(TypeError):
        TrainConfig(log=value)


@pytest.mark.parametrize("values", [{"profile": {"at": 7}}, {"profile.at": 7}])
def test_keys_of_a_group_that_are_not_given_keep_their_defaults(values):
    assert from_mapping(TrainConfig, values) == TrainConfig(profile=Profile(at=7, updates=5))


def test_a_group_shares_names_with_flat_keys_without_mixing_them_up():
    config = from_mapping(Grouped, {"low": 5, "range": {"low": 0.5}})
    assert (config.low, config.range.low, config.range.high) == (5, 0.5, 1.0)
    assert list(keys_of(Grouped)) == ["low", "range.low", "range.high", "range.options"]
    assert list(sections(Grouped)) == ["Before and after the group", "Range"]


def test_rules_between_the_keys_of_a_group_are_checked():
    with pytest.raises(ConfigError, match=r"^range\.low=2\.0: must be below range\.high \(1\.0\)$"):
        from_mapping(Grouped, {"range": {"low": 2}})


def test_configs_do_not_share_their_environment_options():
    assert defaults(TrainConfig)["env"] is not defaults(TrainConfig)["env"]


@pytest.mark.parametrize(
    ("task", "directory"),
    [
        ("walker-walk", "walker-walk"),
        ("gym:HalfCheetah-v5", "gym-HalfCheetah-v5"),
        ("gym:ALE/Pong-v5", "gym-ALE-Pong-v5"),
        ("../walk", "walk"),
    ],
)
def test_the_run_directory_is_named_after_task_experiment_and_seed(task, directory):
    config = TrainConfig(task=task, exp_name="small", seed=3)
    assert run_directory(config) == Path("runs", directory, "small", "seed-3")


def test_workers_that_merge_have_directories_beside_each_other():
    merging = [from_mapping(TrainConfig, MEAN | {"merge.worker": worker}) for worker in range(3)]
    directories = [run_directory(config) for config in merging]
    assert [directory.name for directory in directories] == ["worker-0", "worker-1", "worker-2"]
    assert {directory.parent for directory in directories} == {run_directory(TrainConfig())}


def test_a_worker_that_does_not_merge_is_a_plain_run():
    plain = from_mapping(TrainConfig, {"merge.worker": 5})
    assert run_directory(plain) == run_directory(TrainConfig())
    assert not plain.merge.merges
    assert not plain.merge.is_control


@pytest.mark.parametrize(("control", "members"), [(True, [1, 2]), (False, [0, 1, 2])])
def test_the_control_is_no_member(control, members):
    merging = from_mapping(TrainConfig, MEAN | {"merge.control": control}).merge
    assert merging.members == members
    assert merging.is_control is control


def test_runs_can_be_kept_elsewhere(tmp_path):
    assert run_directory(TrainConfig(run_root=str(tmp_path))).is_relative_to(tmp_path)


def test_yaml_gives_the_same_config_back_with_its_sizes():
    config = TrainConfig(
        model_size=1,
        latent_dim=256,
        task="gym:A-v1",
        env={"a": [1, None]},
        entropy_coef=1e-7,
        log=Log(console="plain"),
        profile=Profile(trace=True, at=0),
    )
    values = yaml.safe_load(to_yaml(config))
    assert values["latent_dim"] == 256
    assert values["mlp_dim"] == MODEL_SIZES[1]["mlp_dim"]
    assert list(values) == list(defaults(TrainConfig))
    assert values["profile"] == {"trace": True, "at": 0, "updates": 5}
    assert from_mapping(TrainConfig, values) == config
