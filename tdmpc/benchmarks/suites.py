"""The keys of the suites that train, and how they are read from the command line.

Their runs are commands of `scripts/train.py`, so whatever that script understands is passed on as it was written.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from tdmpc.command_line import checked_arguments
from tdmpc.commands import TRAIN, Command, help_text
from tdmpc.config import Lists
from tdmpc.keys import ConfigError, Section, from_mapping, key, keys_of, one_of, require, unknown_key

DEFAULT_SUITE = "ops"
TRAIN_DEFAULTS = ("eval_freq=2500", "eval_episodes=5", "log_freq=100", "log.console=plain", "log.tensorboard=false")
"""Keys of train.py whose defaults are other ones here: for curves of minutes, watched closely, and cheap to write."""

OWNED = {
    "seed": "belongs to the suite; see seeds",
    "exp_name": "belongs to the suite: a run has the name of its variant",
    "run_root": "belongs to the suite; see out",
    "resume": "belongs to the suite: the same command continues",
    "overwrite": "belongs to the suite; to start anew, choose another out",
    "save_agent": "belongs to the suite, which continues runs",
    "merge.worker": "belongs to the suite, which starts all workers",
}
"""Keys of train.py that cannot be given, with the reason."""

CHOSEN_BY_VARIANTS = {
    "experiment": "is what a variant is; name it in variants",
    "merge": "belongs to a variant, as in variants=\"[default,'merged=[merge=mean,merge.workers=4]']\"",
}

WHEN_NULL: dict[str, tuple[Any, ...]] = {"variants": ("default", "vectorized"), "seeds": (1, 2, 3)}
"""What null stands for, in the keys of `WallclockConfig` that are lists."""

FLAGS = {
    "--dry": "Print the plan and the estimated time, instead of running; the same as dry=true.",
    "-h, --help": "Print this text.",
}


@dataclass(frozen=True, kw_only=True)
class WallclockConfig(Lists):
    """Variants against wall-clock time."""

    when_null = WHEN_NULL

    suite: str = key("wallclock", "What to measure.", choices=("wallclock",))
    task: str = key("walker-walk", "Task that all variants solve.")
    variants: tuple[str, ...] = key(
        None,
        "List of variants, the first of which the others are compared with: names of presets (experiment) of "
        "scripts/train.py, or 'name=[key=value,...]' in quotes; null takes default and vectorized.",
    )
    seeds: tuple[int, ...] = key(None, "List of seeds, each run by every variant; null takes 1, 2 and 3.", ge=0)
    budget_minutes: float = key(
        10.0,
        "Minutes of seeding, pretraining, training and merging that a run gets; compiling, evaluating, saving and "
        "setting up do not count.",
        gt=0,
    )
    threads: int | None = key(
        None, "CPU threads of a variant, divided among its workers; null takes as many as there are cores.", ge=1
    )
    best: float | None = key(
        None,
        "Return of which 50, 80 and 95 % are timed; null takes the best published one, or else the best that is seen.",
    )
    out: str | None = key(
        None, "Directory of runs and results; null takes runs/benchmark/wallclock-<task>. One with runs is continued."
    )
    dry: bool = key(False, "Whether to print the plan and the estimated time, and do nothing.")


@dataclass(frozen=True, kw_only=True)
class RegressConfig(Section):
    """A fixed set of runs against a stored reference."""

    suite: str = key("regress", "What to measure.", choices=("regress",))
    reference: str = key("docs/results/regress.json", "JSON file with the reference.")
    update_reference: bool = key(False, "Whether to make these runs the reference, instead of comparing with it.")
    slower: float = key(1.25, "Ratio to the speed of the reference from which a speed counts as a regression.", gt=1)
    band: float = key(
        0.25, "Share of the best return by which an evaluation may fall short of that of the reference.", gt=0
    )
    threads: int | None = key(None, "CPU threads of a run; null takes as many as there are cores.", ge=1)
    out: str = key("runs/benchmark/regress", "Directory of the runs; those of an earlier time are replaced.")
    dry: bool = key(False, "Whether to print the plan and the estimated time, and do nothing.")


SuiteConfig: TypeAlias = WallclockConfig | RegressConfig

WALLCLOCK = Command(
    name="benchmark",
    purpose=(
        "Compare variants of training by wall-clock time. Every variant runs every seed, in turns and in a\n"
        "process of its own; tables, pictures and report.html are written after every run. The same command\n"
        "continues after a stop. All other keys of scripts/train.py hold for every variant that does not set\n"
        f"them itself; here {', '.join(TRAIN_DEFAULTS[:3])} unless given."
    ),
    config_class=WallclockConfig,
    groups=(),
    examples=(
        "suite=wallclock task=cup-catch variants=[default,merge4] seeds=[1,2]",
        "suite=wallclock \"variants=[default,'wide=[num_envs=8]']\" --dry",
        "suite=wallclock task=gym:Pendulum-v1 best=-150 eval_freq=500",
    ),
    flags=FLAGS,
)
REGRESS = Command(
    name="benchmark",
    purpose=(
        "Run a fixed set of two tasks with one seed, in about 10 minutes on two CPU cores, and compare its\n"
        "learning curves and speeds with a stored reference: for use before a release. Exits with code 1\n"
        "where something is worse."
    ),
    config_class=RegressConfig,
    groups=(),
    examples=("suite=regress", "suite=regress update_reference=true", "suite=regress slower=1.1 --dry"),
    flags=FLAGS,
)
COMMANDS = {"wallclock": WALLCLOCK, "regress": REGRESS}


class Request(NamedTuple):
    """What was asked for: the keys of the suite, and those that are passed on to train.py as they were written."""

    config: SuiteConfig
    base: tuple[str, ...] = ()


def suite_of(arguments: Sequence[str]) -> str:
    """Return the suite that the arguments name.

    Raises:
        ConfigError: there is no such suite.
    """
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("suite=")]
    suite = named[-1] if named else DEFAULT_SUITE
    suites = (DEFAULT_SUITE, *COMMANDS)
    require(suite in suites, "suite", suite, f"must be {one_of(suites)}")
    return suite


def parse(suite: str, arguments: Sequence[str]) -> Request:
    """Read the arguments of a suite, or print its help where that is asked for.

    Raises:
        ConfigError: an argument cannot be used.
        SystemExit: the help was printed.
    """
    command = COMMANDS[suite]
    flags = [argument for argument in arguments if argument.startswith("-")]
    for flag in flags:
        if flag not in ", ".join(command.flags).split(", "):
            raise ConfigError(f"{flag}: no such flag; --help lists what there is")
    if set(flags) & {"-h", "--help"}:
        print(help_text(command))
        raise SystemExit(0)
    own, base = _split(command, [argument for argument in arguments if argument not in flags])
    for text in (*own, *base):
        _refuse_sweep(text)
    values = {key_of(text): _value(text) for text in checked_arguments(command, own)}
    config = from_mapping(command.config_class, values | ({"dry": True} if flags else {}))
    assert isinstance(config, WallclockConfig | RegressConfig)
    return Request(config, tuple(checked_arguments(TRAIN, base)))


def key_of(override: str) -> str:
    """Return the key of an override as it is written."""
    return override.partition("=")[0].lstrip("+~")


def _split(command: Command, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the suite's own arguments and those of train.py."""
    own = list(keys_of(command.config_class))
    passed_on = [*keys_of(TRAIN.config_class), *TRAIN.groups] if command is WALLCLOCK else []
    chosen: tuple[list[str], list[str]] = ([], [])
    for argument in arguments:
        name, _, value = argument.partition("=")
        is_own = key_of(argument) in own
        if not is_own and key_of(argument) not in passed_on and not (passed_on and key_of(argument).startswith("env.")):
            raise unknown_key(name, [*own, *passed_on])
        refused = OWNED | CHOSEN_BY_VARIANTS
        require(is_own or name not in refused, name, value, refused.get(name, ""))
        chosen[not is_own].append(argument)
    return chosen


def _refuse_sweep(argument: str) -> None:
    value = argument.partition("=")[2]
    several = False
    with contextlib.suppress(HydraException):  # which is told at length later
        several = OverridesParser.create().parse_override(argument).is_sweep_override()
    if several:
        raise ConfigError(f"{argument}: must be one value, or a list in brackets where the key takes one: [{value}]")


def _value(override: str) -> Any:
    return OverridesParser.create().parse_override(override).value()
