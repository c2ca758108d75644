"""How a configuration declares its keys; what the keys are stands in `tdmpc/config.py`."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """A setting that cannot be used, in one line: the key, what was given, what is allowed."""


@dataclass(frozen=True)
class Limits:
    """Which values of the right type a key accepts, and the words that may stand in place of one."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str | int, ...] = ()
    words: tuple[str, ...] = ()

    def accept(self, value: Any) -> bool:
        """Say whether `value` is one of the choices and within the bounds."""
        return (
            (not self.choices or value in self.choices)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def describe(self, noun: str) -> str:
        """Describe the accepted values, which without choices and bounds are any `noun`."""
        if self.choices:
            return one_of(self.choices)
        bounds = {"of at least": self.ge, "above": self.gt, "of at most": self.le, "below": self.lt}
        limits = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
        return f"{noun} {limits}" if limits else noun


@dataclass(frozen=True)
class Key:
    """A key as the command line knows it; its name has a dot where it belongs to a group.

    A key that is `required` has the default None; any other key whose default is None accepts null.
    """

    name: str
    type: type
    default: Any
    required: bool
    sentence: str
    limits: Limits

    def convert(self, value: Any) -> Any:
        """Return `value` as the type of the key; raise ConfigError where the key does not allow it."""
        nullable = self.default is None and not self.required
        if value is None and nullable:
            return None
        if value is None and self.required:
            raise ConfigError(f"{self.name}: must be given; {self.sentence}")
        if isinstance(value, str) and value in self.limits.words:
            return value
        noun, to_type = _TYPES[self.type]
        try:
            converted = to_type(value)
            acceptable = self.limits.accept(converted)
        except (ValueError, OverflowError):
            acceptable = False
        if acceptable:
            return converted
        instead = "".join(f", or {word}" for word in (*self.limits.words, *(["null"] if nullable else [])))
        raise refusal(self.name, value, f"must be {self.limits.describe(noun)}{instead}")


def key(default: Any, sentence: str, **limits: Any) -> Any:
    """Declare a key of a section, with its default (`MISSING` where it must be given) and its sentence.

    `limits` are the fields of `Limits`. A key whose default is None accepts null.
    """
    metadata = {"sentence": sentence, "limits": Limits(**limits)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Keys that belong together. A configuration inherits from its sections, whose keys are then its own.

    A group, whose keys are `log.console` and `log.tensorboard`, is a section with the prefix `log.` that is a field
    of the configuration instead, `log: Log = Log()`. Its keys have defaults, and it has no groups in it.

    Every value is converted and checked when the object is made, whoever makes it. A section that has rules
    between keys extends `__post_init__` and states them after calling its parent's.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for member in fields(self):
            value = getattr(self, member.name)
            group = _group_of(member)
            if group is None:
                value = _key_of(type(self), member).convert(value)
            elif not isinstance(value, group):
                value = group(**value)
            object.__setattr__(self, member.name, value)


SomeSection = TypeVar("SomeSection", bound=Section)


def from_mapping(config_class: type[SomeSection], values: Mapping[str, Any]) -> SomeSection:
    """Make a configuration from `values`; keys that are not among them keep their defaults.

    The keys of a group stand under its name, or have their dotted names.
    Raises ConfigError where a key is unknown, is missing, or has a value that is not allowed.
    """
    known = keys_of(config_class)
    given = dict(_dotted(values, known))
    for name in given:
        if name not in known:
            raise unknown_key(name, known)
    return config_class(**_nested({name: given.get(name, key.default) for name, key in known.items()}))


def defaults(config_class: type[Section]) -> dict[str, Any]:
    """Return the default of every key, those of a group under its name; a key that must be given is None."""
    return _nested({name: key.default for name, key in keys_of(config_class).items()})


def keys_of(config_class: type[Section]) -> dict[str, Key]:
    """Return every key by its name, dotted in a group, in the order of the sections."""
    return {key.name: key for keys in sections(config_class).values() for key in keys}


def sections(config_class: type[Section]) -> dict[str, list[Key]]:
    """Return the keys of a configuration under the titles of its sections and groups.

    A title is the first line of the section's docstring, without its full stop. Where the configuration
    declares the key of a section anew, its own declaration counts.
    """
    waiting = {member.name: member for member in fields(config_class)}
    titled: dict[str, list[Key]] = {}
    for section in (*config_class.__mro__[1:], config_class):
        for member in [waiting.pop(name) for name in inspect.get_annotations(section) if name in waiting]:
            if group := _group_of(member):
                titled[_title(group)] = [_key_of(group, own_member) for own_member in fields(group)]
            else:
                titled.setdefault(_title(section), []).append(_key_of(config_class, member))
    return titled


def to_mapping(config: Section) -> dict[str, Any]:
    """Return a configuration as plain types, the keys of a group under its name."""
    return yaml.safe_load(to_yaml(config))


def to_yaml(config: Section) -> str:
    """Write a configuration as YAML under the titles of its sections."""
    blocks = []
    for title, keys in sections(type(config)).items():
        values = _nested({key.name: attrgetter(key.name)(config) for key in keys})
        blocks.append(f"# {title}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}")
    return "\n".join(blocks)


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Refuse the value of a key unless `condition` holds."""
    if not condition:
        raise refusal(name, value, allowed)


def refusal(name: str, value: object, allowed: str) -> ConfigError:
    """Make the error for a value that is not allowed."""
    return ConfigError(f"{name}={shown(value)}: {allowed}")


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """Make the error for a key that does not exist; it names the closest that do, of a group its keys."""
    known, group = list(known), name.partition(".")[0]
    members = [other for other in known if other.startswith(f"{name}.")]
    candidates = [other for other in known if "." in name and other.startswith(f"{group}.")] or known
    closest = members or difflib.get_close_matches(name, candidates, n=3)
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


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        group, _, own_name = name.rpartition(".")
        (tree.setdefault(group, {}) if group else tree)[own_name] = value
    return tree


def _dotted(tree: Mapping[str, Any], known: Iterable[str]) -> Iterator[tuple[str, Any]]:
    groups = {name.partition(".")[0] for name in known if "." in name}
    for name, value in tree.items():
        if name in groups and isinstance(value, Mapping):
            yield from ((f"{name}.{own_name}", own_value) for own_name, own_value in value.items())
        else:
            yield name, value


def _title(section: type) -> str:
    return (section.__doc__ or "").splitlines()[0].rstrip(".")


def _group_of(member: Field[Any]) -> type[Section] | None:
    return type(member.default) if isinstance(member.default, Section) else None


def _key_of(section: type[Section], member: Field[Any]) -> Key:
    required = member.default is MISSING and member.default_factory is MISSING
    default = member.default if member.default_factory is MISSING else member.default_factory()
    return Key(
        name=section.prefix + member.name,
        type=_type_of(member),
        default=None if required else default,
        required=required,
        **member.metadata,
    )


def _type_of(member: Field[Any]) -> type:
    annotation: Any = member.type
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
