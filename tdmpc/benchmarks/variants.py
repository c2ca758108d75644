"""Variants: what they are, and what a run of one is told."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml
from hydra import compose, initialize_config_dir

from tdmpc.benchmarks.suites import OWNED, key_of
from tdmpc.command_line import checked_arguments, from_hydra
from tdmpc.commands import CONFIG_DIRECTORY, TRAIN, group_options
from tdmpc.config import TrainConfig
from tdmpc.keys import ConfigError, one_of, refusal

SIDE_BY_SIDE = ("-m", "hydra/launcher=joblib")

_INLINE = re.compile(r"(?P<name>[^=]+)=\[(?P<overrides>.*)\]", re.DOTALL)
_NAME = re.compile(r"[A-Za-z][\w+-]*")
_PLAIN = re.compile(r"[\w./:+-]+")
_WORDS = ("null", "true", "false", "nan", "inf")  # which are no text to Hydra
_NOT_ITS_OWN = {"task": "belongs to the suite: all variants solve one task"} | OWNED


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: of the variant.
        overrides: what sets it apart, as a user of train.py writes it.
        sets: keys that it sets itself, whatever holds for the others.
        config: all keys of its run with the first seed; of its first worker that merges, where it is a group.
    """

    name: str
    overrides: tuple[str, ...]
    sets: frozenset[str]
    config: TrainConfig

    @property
    def workers(self) -> int:
        """Number of processes that train."""
        return self.config.merge.workers or 1 if self.config.merge.merges else 1

    @property
    def members(self) -> list[int | None]:
        """Workers whose curves are the variant's: those that merge, or None for the run of one that trains alone."""
        return [*self.config.merge.members] if self.config.merge.merges else [None]


def read_variant(text: str, base: Sequence[str]) -> Variant:
    """Make a variant from the name of a preset, or from `name=[key=value,...]`.

    Args:
        text: as given.
        base: overrides that hold for all variants, where one does not set the key itself.

    Raises:
        ConfigError: there is no such preset, or a run could not be told so.
    """
    inline = _INLINE.fullmatch(text)
    if inline:
        name, overrides = inline["name"], tuple(_split(inline["overrides"]))
        if not _NAME.fullmatch(name) or name.lower() in _WORDS:
            raise refusal("variants", text, "its name must be of letters, digits and any of _ + -, a letter first")
    else:
        name, overrides = text, (f"experiment={text}",)
        _check_preset(text)
    try:
        sets = frozenset(_keys_set_by(checked_arguments(TRAIN, overrides)))
        for key in map(key_of, overrides):
            if key in _NOT_ITS_OWN:
                raise ConfigError(f"{key}: {_NOT_ITS_OWN[key]}")
        config = _composed([*_without(base, sets), *overrides])
    except ConfigError as error:
        raise ConfigError(f"variants={text}: {error}") from None
    return Variant(name, overrides, sets, config)


def train_arguments(variant: Variant, base: Sequence[str], own: Mapping[str, Any]) -> list[str]:
    """Return the arguments of train.py for a run, or for a group of workers.

    Args:
        variant: what is run.
        base: overrides that hold for all variants.
        own: values of keys that the suite decides, which win.
    """
    texts = [*_without(base, {*variant.sets, *own}), *(text for text in variant.overrides if key_of(text) not in own)]
    decided = [f"{name}={_quoted(value)}" for name, value in own.items()]
    if not variant.config.merge.merges:
        return [*texts, *decided]
    numbers = ",".join(map(str, range(variant.workers)))
    return [*SIDE_BY_SIDE, *texts, *decided, f"merge.worker={numbers}"]


def differences(variants: Sequence[Variant]) -> dict[str, list[Any]]:
    """Return the keys, dotted, in which variants differ, with the value of each variant."""
    flat = [dict(_flat(asdict(variant.config))) for variant in variants]
    left_out = {"merge.worker"}
    values = {name: [config.get(name) for config in flat] for name in flat[0] if name not in left_out}
    return {name: different for name, different in values.items() if any(value != different[0] for value in different)}


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else "'{}'".format(text.replace("\\", "\\\\").replace("'", "\\'"))


def _check_preset(name: str) -> None:
    options = sorted(group_options("experiment"))
    if name not in options:
        raise refusal("variants", name, f"must be {one_of(options)}, or 'name=[key=value,...]'")


def _split(text: str) -> Iterator[str]:
    """Yield what commas outside of brackets separate."""
    depth, begin = 0, 0
    for place, character in enumerate(text):
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if last := text[begin:].strip():
        yield last


def _keys_set_by(overrides: Sequence[str]) -> Iterator[str]:
    for text in overrides:
        yield key_of(text)
        if key_of(text) == "experiment":
            yield from _keys_in_preset(text.partition("=")[2])


def _keys_in_preset(name: str) -> Iterator[str]:
    content = yaml.safe_load((CONFIG_DIRECTORY / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")) or {}
    yield from (key for key, _ in _flat(content) if key != "defaults")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _without(overrides: Sequence[str], keys: set[str] | frozenset[str]) -> list[str]:
    return [text for text in overrides if key_of(text) not in keys]


def _composed(overrides: Sequence[str]) -> TrainConfig:
    """Return what train.py makes of these overrides; a group of workers is seen as its first that merges."""
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        config = from_hydra(TrainConfig, compose("train", list(overrides)))
        if not config.merge.is_control:
            return config
        if not config.merge.members:
            raise ConfigError("merge.workers: must be at least 2 where worker 0 is the control")
        return from_hydra(TrainConfig, compose("train", [*overrides, f"merge.worker={config.merge.members[0]}"]))
