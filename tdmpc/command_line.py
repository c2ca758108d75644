"""From the words on the command line, through Hydra, to a checked configuration.

Hydra composes presets, overrides and multiruns. It is given plain values and so knows only the names of the
keys; types and limits are checked by the configuration itself. Importing this module tells Hydra the defaults.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tdmpc.commands import BENCHMARK, EVALUATE, TRAIN, Command, group_options, help_text
from tdmpc.keys import ConfigError, SomeSection, defaults, from_mapping, keys_of, one_of, refusal, require, unknown_key
from tdmpc.multirun import completed

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def prepare_arguments(command: Command) -> None:
    """Check `sys.argv` before Hydra reads it, and print the help where it is asked for.

    Exits with one line and code 2 where Hydra would refuse an argument at length.
    """
    with one_line_errors():
        sys.argv[1:] = checked_arguments(command, sys.argv[1:])


@contextmanager
def one_line_errors(*user_errors: type[Exception]) -> Iterator[None]:
    """Turn a ConfigError, or one of `user_errors`, into one line on stderr and exit code 2; Ctrl-C into code 130.

    It has to stand inside Hydra's main function, because Hydra prints an exception that reaches it at length.
    """
    try:
        yield
    except (ConfigError, *user_errors) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def from_hydra(
    config_class: type[SomeSection], composed: DictConfig, environ: Mapping[str, str] = os.environ
) -> SomeSection:
    """Make a configuration from what Hydra has composed, and torchrun has put into the environment.

    Raises ConfigError where a key is unknown or its value is not allowed, or where the checkpoint does not exist.
    """
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(values, dict)
    values = {str(name): value for name, value in values.items()}
    if isinstance(values.get("merge"), dict) and "TORCHELASTIC_RUN_ID" in environ:
        values["merge"] |= _numbered_by_torchrun(values["merge"], int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    config = from_mapping(config_class, values)
    checkpoint = getattr(config, "checkpoint", None)
    if checkpoint is not None:
        require(Path(checkpoint).exists(), "checkpoint", checkpoint, "there is no such file or directory")
    return config


def _numbered_by_torchrun(merge: Mapping[str, Any], rank: int, world_size: int) -> dict[str, int]:
    """Return the keys of a worker that torchrun has started: the rank is its number."""
    if world_size > 1:
        require(merge["strategy"] != "none", "merge", "none", "must be a strategy, for torchrun has started workers")
    require(merge["worker"] in (0, rank), "merge.worker", merge["worker"], f"must be left to torchrun, here {rank}")
    workers_fit = merge["workers"] in (None, world_size)
    require(workers_fit, "merge.workers", merge["workers"], f"must be left to torchrun, which has started {world_size}")
    return {"worker": rank, "workers": world_size}


def checked_arguments(command: Command, arguments: Sequence[str]) -> list[str]:
    """Return the arguments in the order that Hydra accepts, flags first.

    Raises ConfigError where an argument cannot be read, or names a key or preset that does not exist.
    """
    options, unknown = get_args_parser().parse_known_intermixed_args(arguments)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; --help lists what there is")
    if options.help:
        _print_to_reader(help_text(command))
        raise SystemExit(0)
    overrides = [_parsed(argument) for argument in options.overrides]
    for override in overrides:
        _check_override(command, override, options.multirun)
    flags = [word for word in arguments if word not in options.overrides]
    more = completed(overrides, command.name) if options.multirun else []
    return flags + options.overrides + more


def _print_to_reader(text: str) -> None:
    """Print to whoever reads, and say nothing to a reader that has left, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is still buffered would be written, and fail again, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_override(command: Command, override: Override, multirun: bool) -> None:
    argument = override.input_line
    if override.is_hydra_override():
        return
    name = override.key_or_group
    known = [*keys_of(command.config_class), *command.groups]
    is_option = name.startswith("env.")
    if name not in known and not is_option:
        raise unknown_key(name, known)
    changes = override.type is OverrideType.CHANGE or (is_option and not override.is_delete())
    if not changes or override.package is not None:
        raise ConfigError(f"{argument}: must be plain key=value")
    if override.is_sweep_override() and not multirun:
        raise ConfigError(f"{argument}: several values need the flag --multirun")
    if name in command.groups:
        _check_choice(override)


def _parsed(argument: str) -> Override:
    name, equals, value = argument.partition("=")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = f"cannot be read; quote the value, as in '{name}=\"{value}\"'" if equals else "must be plain key=value"
        raise ConfigError(f"{argument}: {reason}") from error


def _check_choice(override: Override) -> None:
    value = override.value()
    chosen = value.list if isinstance(value, ChoiceSweep) else [value]
    options = group_options(override.key_or_group)
    for option in chosen:
        if not isinstance(option, str) or option not in options:
            raise refusal(override.key_or_group, option, f"must be {one_of(options)}")


def _register_defaults(command: Command) -> None:
    node = OmegaConf.create(defaults(command.config_class))
    # The options of an environment are not known here, so Hydra must let new ones in.
    OmegaConf.set_struct(node.env, False)
    ConfigStore.instance().store(name=f"{command.name}_defaults", node=node)


for _command in (TRAIN, EVALUATE, BENCHMARK):
    _register_defaults(_command)
