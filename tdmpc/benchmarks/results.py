"""What was measured, as data: in memory, as JSON, as the lines of a table."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tdmpc.keys import refusal

FORMAT = 1

HEADER = (
    f"{'op':<9}{'size':>5}{'envs':>5} {'variant':<9}{'median':>11}{'min':>11}{'p90':>11}{'first':>11}{'n':>5}"
    f"{'GFLOP':>8}{'GFLOP/s':>8}{'peak':>6}"
)


class Subject(NamedTuple):
    """What was timed, by which the records of two files are paired."""

    name: str
    model_size: int | None
    num_envs: int | None
    variant: str | None

    def __str__(self) -> str:
        size = "" if self.model_size is None else f" of size {self.model_size}"
        envs = "" if self.num_envs is None else f" with {self.num_envs} environment{'s' if self.num_envs > 1 else ''}"
        return " ".join(filter(None, [self.name, self.variant])) + size + envs


@dataclass(frozen=True)
class Record:
    """One operation, timed.

    Attributes:
        name: of the operation.
        model_size: of the agent, in millions of parameters; None where no agent takes part.
        num_envs: environments; None where their number makes no difference.
        variant: tells apart what is otherwise the same operation.
        median_s: median of the counted calls.
        min_s: fastest of them.
        p90_s: their 90 % quantile.
        first_s: the very first call, with all compiling and allocating; it does not count.
        repeats: number of counted calls.
        gflop: 10^9 FLOP of matrix products in a call; None where there are none.
        precision: of these products, the type of most of them first.
        gflops_per_s: `gflop` over `median_s`.
        peak_share: time that the products would take at the measured peak of their precision, over `median_s`.
        bytes: of what the call returns or stores, where that is data.
        hidden_s: time by which doing two things at once is shorter than one after the other.
        hidden_frac: `hidden_s` as a share of the environments' step.
    """

    name: str
    median_s: float
    min_s: float
    p90_s: float
    first_s: float
    repeats: int
    model_size: int | None = None
    num_envs: int | None = None
    variant: str | None = None
    gflop: float | None = None
    precision: str | None = None
    gflops_per_s: float | None = None
    peak_share: float | None = None
    bytes: int | None = None
    hidden_s: float | None = None
    hidden_frac: float | None = None

    @property
    def subject(self) -> Subject:
        """What was timed."""
        return Subject(self.name, self.model_size, self.num_envs, self.variant)

    def line(self) -> str:
        """Return the line of the table, under `HEADER`."""
        key = f"{self.name:<9}{_or_blank(self.model_size):>5}{_or_blank(self.num_envs):>5} {self.variant or '':<9}"
        times = "".join(f"{duration(s):>11}" for s in (self.median_s, self.min_s, self.p90_s, self.first_s))
        return f"{key}{times}{self.repeats:>5}{self._remark()}"

    def _remark(self) -> str:
        if self.gflop is not None and self.gflops_per_s is not None:
            share = "" if self.peak_share is None else f"{self.peak_share:.0%}"
            return f"{_three_digits(self.gflop):>8}{_three_digits(self.gflops_per_s):>8}{share:>6}"
        if self.hidden_frac is not None:
            return f" hides {duration(self.hidden_s or 0)}, {self.hidden_frac:.0%}"
        if self.bytes is not None:
            return f" {_size(self.bytes)}"
        return ""


@dataclass(frozen=True)
class Results:
    """All that a suite measured.

    Attributes:
        machine: what it was measured on, with `peak_gflops_per_s` by precision.
        config: every key and its value.
        records: in the order of measuring.
    """

    machine: Mapping[str, Any]
    config: Mapping[str, Any]
    records: list[Record]

    def write(self, path: Path) -> None:
        """Write JSON.

        Raises:
            FileExistsError: there is such a file.
        """
        content = {"format": FORMAT, **asdict(self)}
        with path.open("x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Read what `write` wrote; fields of records that are not known here are left out.

        Raises:
            ConfigError: there is no such file, or it is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            records = [_record(entry) for entry in content["records"]] if content["format"] == FORMAT else []
            results = cls(dict(content["machine"]), dict(content["config"]), records)
        except OSError as error:
            raise refusal("baseline", path, f"cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise refusal("baseline", path, "must be a JSON file that scripts/benchmark.py wrote") from None
        if content["format"] != FORMAT:
            raise refusal("baseline", path, f"is of format {content['format']}; must be of format {FORMAT}")
        return results


def _record(entry: Mapping[str, Any]) -> Record:
    known = {field.name for field in fields(Record)}
    return Record(**{name: value for name, value in entry.items() if name in known})


def plain(config: Any) -> dict[str, Any]:
    """Return the values of a configuration as JSON gives them back, with lists for tuples."""
    return json.loads(json.dumps(asdict(config)))


def duration(seconds: float) -> str:
    """Write a time with three digits and the unit that suits it."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def _size(count: float) -> str:
    return _scaled(count, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """Write a value in the largest of the units that leaves at least 1 of it, else in the last."""
    *_, smallest = units
    unit = next((name for name, size in units.items() if abs(value) >= size), smallest)
    return f"{_three_digits(value / units[unit])} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def _or_blank(value: int | None) -> str:
    return "" if value is None else str(value)
