"""How a configuration declares its keys; what the keys are stands in `tdmpc/config.py`."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """A setting that cannot be used, in one line: the key, what was given, what is allowed."""


@dataclass(frozen=True)
class Key:
    """What a key has besides its name, its type and its default."""

    sentence: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str | int, ...] = ()

    def accepts(self, value: Any) -> bool:
        """Say whether `value`, of the right type, is one of the choices and within the bounds."""
        return (
            (not self.choices or value in self.choices)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def allowed(self, noun: str) -> str:
        """Describe the accepted values, which without choices and bounds are any `noun`."""
        if self.choices:
            return one_of(self.choices)
        bounds = {"of at least": self.ge, "above": self.gt, "of at most": self.le, "below": self.lt}
        limits = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
        return f"{noun} {limits}" if limits else noun


def key(default: Any, sentence: str, **limits: Any) -> Any:
    """Declare a key of a section, with its default (`MISSING` where it must be given) and its sentence.

    `limits` are the other fields of `Key`. A key whose default is None accepts null.
    """
    metadata = {"key": Key(sentence, **limits)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Keys that belong together; a configuration inherits from its sections and so is flat.

    Every value is converted and checked when the object is made, whoever makes it. A section that has rules
    between keys extends `__post_init__` and states them after calling its parent's.
    """

    def __post_init__(self) -> None:
        for key_field in fields(self):
            value = convert(key_field, getattr(self, key_field.name))
            object.__setattr__(self, key_field.name, value)


SomeSection = TypeVar("SomeSection", bound=Section)


def from_mapping(config_class: type[SomeSection], values: Mapping[str, Any]) -> SomeSection:
    """Make a configuration from `values`; keys that are not among them keep their defaults.

    Raises ConfigError where a key is unknown, is missing, or has a value that is not allowed.
    """
    known = defaults(config_class)
    for name in values:
        if name not in known:
            raise unknown_key(name, known)
    return config_class(**{**known, **values})


def defaults(config_class: type[Section]) -> dict[str, Any]:
    """Return every key with its default, in the order of the sections; a key that must be given is None."""
    every_field = [key_field for group in sections(config_class).values() for key_field in group]
    return {key_field.name: default_of(key_field) for key_field in every_field}


def default_of(key_field: Field[Any]) -> Any:
    """Return the default of a key, None where it must be given."""
    if key_field.default_factory is not MISSING:
        return key_field.default_factory()
    return None if is_required(key_field) else key_field.default


def is_required(key_field: Field[Any]) -> bool:
    """Say whether the key must be given."""
    return key_field.default is MISSING and key_field.default_factory is MISSING


def sections(config_class: type[Section]) -> dict[str, list[Field[Any]]]:
    """Return the keys of a configuration under the titles of its sections.

    A title is the first line of the section's docstring, without its full stop. Where the configuration
    declares the key of a section anew, its own declaration counts.
    """
    waiting = {key_field.name: key_field for key_field in fields(config_class)}
    groups = {}
    for section in config_class.__mro__[1:]:
        own = [waiting.pop(name) for name in inspect.get_annotations(section) if name in waiting]
        if own:
            groups[(section.__doc__ or "").splitlines()[0].rstrip(".")] = own
    return groups


def sentence_of(key_field: Field[Any]) -> str:
    """Return the documentation of a key."""
    return key_field.metadata["key"].sentence


def to_yaml(config: Section) -> str:
    """Write a configuration as YAML under the titles of its sections."""
    blocks = []
    for title, group in sections(type(config)).items():
        values = {key_field.name: getattr(config, key_field.name) for key_field in group}
        blocks.append(f"# {title}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}")
    return "\n".join(blocks)


def convert(key_field: Field[Any], value: Any) -> Any:
    """Return `value` as the type of the key; raise ConfigError where the key does not allow it."""
    if value is None and key_field.default is None:
        return None
    if value is None and is_required(key_field):
        raise ConfigError(f"{key_field.name}: must be given; {sentence_of(key_field)}")
    rules: Key = key_field.metadata["key"]
    noun, to_type = _TYPES[_type_of(key_field)]
    try:
        converted = to_type(value)
        acceptable = rules.accepts(converted)
    except (ValueError, OverflowError):
        acceptable = False
    if acceptable:
        return converted
    suffix = ", or null" if key_field.default is None else ""
    raise refusal(key_field.name, value, f"must be {rules.allowed(noun)}{suffix}")


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Refuse the value of a key unless `condition` holds."""
    if not condition:
        raise refusal(name, value, allowed)


def refusal(name: str, value: object, allowed: str) -> ConfigError:
    """Make the error for a value that is not allowed."""
    return ConfigError(f"{name}={shown(value)}: {allowed}")


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """Make the error for a key that does not exist; it names the closest that do."""
    closest = difflib.get_close_matches(name, list(known), n=3)
    hint = f"close to it: {', '.join(closest)}" if closest else "--help lists all keys"
    return ConfigError(f"{name}: no such key; {hint}")


def one_of(choices: Iterable[str | int]) -> str:
    """Describe a choice."""
    names = [str(choice) for choice in choices]
    return f"one of {', '.join(names)}" if len(names) > 1 else names[0]


def shown(value: object) -> str:
    """Show a value as the command line would have it, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if text.isprintable() else repr(text)


def _type_of(key_field: Field[Any]) -> type:
    annotation: Any = key_field.type
    if isinstance(annotation, UnionType):
        annotation = next(option for option in get_args(annotation) if option is not NoneType)
    return get_origin(annotation) or annotation


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _to_int(value: Any) -> int:
    number = _to_float(value)
    if not number.is_integer():
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _to_text(value: Any) -> str:
    # A name such as `exp_name=2` reaches us as a number.
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError
    return str(value)


def _to_options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return dict(value)


_TYPES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _to_bool),
    int: ("a whole number", _to_int),
    float: ("a finite number", _to_float),
    str: ("a text that is not empty", _to_text),
    Mapping: ("options, each written as key.option=value", _to_options),
}
