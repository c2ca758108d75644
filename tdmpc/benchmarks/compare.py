"""Two results side by side: what got slower, and whether the two can be compared at all."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tdmpc.benchmarks.results import Record, Results, Subject, duration
from tdmpc.keys import shown

MACHINE_KEYS = ("cpu", "cores", "threads", "device", "torch")
"""What of the machine changes times; of the rest, such as the date, nothing is said."""

WITHOUT_EFFECT = (
    *("ops", "model_sizes", "num_envs", "repeats", "budget_s", "seed", "threads", "device"),
    *("out", "baseline", "slower", "fail_if_slower"),
)
"""Keys that do not change a time, or of which the machine tells more."""

HEADER = f"{'op':<9}{'size':>5}{'envs':>5} {'variant':<9}{'before':>11}{'now':>11}{'ratio':>8}"


@dataclass(frozen=True)
class Change:
    """The same measurement before and now."""

    before: Record
    now: Record

    @property
    def ratio(self) -> float:
        """Median now, over median before."""
        return self.now.median_s / self.before.median_s


@dataclass(frozen=True)
class Comparison:
    """Results paired with earlier ones.

    Attributes:
        differences: settings of machine and configuration that differ: before and now by name.
        changes: what both measured.
        missing: what only the earlier results have.
        new: what only the present results have.
        threshold: ratio from which on a change is called slower, and below whose inverse it is called faster.
    """

    differences: Mapping[str, tuple[Any, Any]]
    changes: list[Change]
    missing: list[Subject]
    new: list[Subject]
    threshold: float

    @property
    def slower(self) -> list[Change]:
        """The changes for the worse, the worst first."""
        return sorted((c for c in self.changes if c.ratio >= self.threshold), key=lambda c: -c.ratio)

    def lines(self) -> Iterator[str]:
        """Say all of it: differences first, a table, then in a sentence what got slower."""
        if self.differences:
            differing = (f"{name} {shown(now)} (was {shown(was)})" for name, (was, now) in self.differences.items())
            yield f"not measured alike: {'; '.join(differing)}"
        if self.changes:
            yield HEADER
            yield from map(self._line, self.changes)
        for title, subjects in (("only in the baseline", self.missing), ("not in the baseline", self.new)):
            if subjects:
                counts = Counter(subject.name for subject in subjects)
                yield f"{title}: {', '.join(f'{count} of {name}' for name, count in counts.items())}"
        yield self._verdict()

    def _line(self, change: Change) -> str:
        name, size, envs, variant = ("" if part is None else str(part) for part in change.now.subject)
        times = f"{duration(change.before.median_s):>11}{duration(change.now.median_s):>11}{change.ratio:>8.2f}"
        faster = change.ratio <= 1 / self.threshold
        word = "  slower" if change in self.slower else "  faster" if faster else ""
        return f"{name:<9}{size:>5}{envs:>5} {variant:<9}{times}{word}"

    def _verdict(self) -> str:
        if not self.changes:
            return "nothing to compare: the baseline measured other things"
        if not self.slower:
            return f"nothing got slower by a factor of {self.threshold:g}"
        slower = ", ".join(f"{change.now.subject} ({change.ratio:.2f} times)" for change in self.slower)
        return f"slower: {slower}"


def compare(before: Results, now: Results, threshold: float) -> Comparison:
    """Pair the records of two results by operation, model size, number of environments and variant."""
    earlier = {record.subject: record for record in before.records}
    present = {record.subject: record for record in now.records}
    return Comparison(
        differences=_differences(before, now),
        changes=[Change(earlier[subject], record) for subject, record in present.items() if subject in earlier],
        missing=[subject for subject in earlier if subject not in present],
        new=[subject for subject in present if subject not in earlier],
        threshold=threshold,
    )


def _differences(before: Results, now: Results) -> dict[str, tuple[Any, Any]]:
    keys = [name for name in now.config if name in before.config and name not in WITHOUT_EFFECT]
    machines = {name: (before.machine.get(name), now.machine.get(name)) for name in MACHINE_KEYS}
    pairs = machines | {name: (before.config[name], now.config[name]) for name in keys}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
