"""What sections did in a stretch of time: running numbers, and the statistics made of them."""

from collections.abc import Mapping
from dataclasses import dataclass

OTHER = "other"
"""The time of the budget's thread in no section."""
BACKGROUND = "background"
"""The first part of the paths of all other threads."""


@dataclass(frozen=True, slots=True)
class SectionStats:
    """What a section did in a window."""

    count: int
    """Calls that ended."""
    total_s: float
    """Seconds spent in the section and in all inside it, calls under way included."""
    mean_s: float | None
    """Mean length of the calls that ended; None if none did, as `max_s` and `min_s`."""
    max_s: float | None
    """Length of the longest."""
    min_s: float | None
    """Length of the shortest."""
    self_s: float
    """Seconds spent in the section and in none inside it."""
    share: float
    """`total_s` as a fraction of the window's wall time; of `background/`, several threads together may exceed 1."""
    device_total_s: float | None = None
    """Seconds between begin and end on the device's stream; None if none was read, as on CPU."""
    device_mean_s: float | None = None
    """Mean of these over the calls read."""
    device_max_s: float | None = None
    """The longest of these."""


_ROW = ("mean_s", "max_s", "total_s", "count", "share", "device_mean_s", "device_max_s", "device_total_s")


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in a stretch of time: the self times of `sections` and `other_s` add up to `wall_s`."""

    wall_s: float
    """Seconds from its begin to its end."""
    other_s: float
    """Seconds of them in no section."""
    sections: Mapping[str, SectionStats]
    """The sections of the budget's thread by path, each before those inside it; empty if none ran."""
    background: Mapping[str, SectionStats]
    """The same for all other threads; paths begin with `background/`."""

    @property
    def other_share(self) -> float:
        """`other_s` as a fraction of the wall time."""
        return _share(self.other_s, self.wall_s)

    def row(self) -> dict[str, float]:
        """Return `time/<path>/<statistic>` for every path, and `time/other/{total_s,share}`; nothing if none ran."""
        row = {
            f"time/{path}/{name}": value
            for path, stats in (*self.sections.items(), *self.background.items())
            for name in _ROW
            if (value := getattr(stats, name)) is not None
        }
        if row:
            row |= {f"time/{OTHER}/total_s": self.other_s, f"time/{OTHER}/share": self.other_share}
        return row


@dataclass(slots=True)
class Tally:
    """Running numbers of one section; the lengths of calls are those of calls that ended."""

    count: int = 0
    self_s: float = 0.0
    calls_s: float = 0.0
    max_s: float = 0.0
    min_s: float = 0.0  # not infinite before the first call, which JSON could not hold
    device_count: int = 0
    device_s: float = 0.0
    device_max_s: float = 0.0

    def add_call(self, seconds: float) -> None:
        """Count a call that ended."""
        if seconds < self.min_s or not self.count:
            self.min_s = seconds
        if seconds > self.max_s:
            self.max_s = seconds
        self.count += 1
        self.calls_s += seconds

    def add_device_call(self, seconds: float) -> None:
        """Count a call whose time on the device was read."""
        self.device_count += 1
        self.device_s += seconds
        self.device_max_s = max(self.device_max_s, seconds)

    def merge(self, more: "Tally") -> None:
        """Add the numbers of another stretch of time."""
        self.min_s = min((tally.min_s for tally in (self, more) if tally.count), default=0.0)
        self.max_s = max(self.max_s, more.max_s)
        self.count += more.count
        self.self_s += more.self_s
        self.calls_s += more.calls_s
        self.device_max_s = max(self.device_max_s, more.device_max_s)
        self.device_count += more.device_count
        self.device_s += more.device_s

    def stats(self, total_s: float, wall_s: float) -> SectionStats:
        """Return the statistics, given the seconds of the section with all inside it and of the whole stretch."""
        ended, read = self.count > 0, self.device_count > 0
        return SectionStats(
            count=self.count,
            total_s=total_s,
            mean_s=self.calls_s / self.count if ended else None,
            max_s=self.max_s if ended else None,
            min_s=self.min_s if ended else None,
            self_s=self.self_s,
            share=_share(total_s, wall_s),
            device_total_s=self.device_s if read else None,
            device_mean_s=self.device_s / self.device_count if read else None,
            device_max_s=self.device_max_s if read else None,
        )


def merge(into: dict[str, Tally], more: Mapping[str, Tally]) -> None:
    """Add the numbers of another stretch of time, path by path."""
    for path, tally in more.items():
        into.setdefault(path, Tally()).merge(tally)


def summarise(tallies: Mapping[str, Tally]) -> Window:
    """Return the statistics of the running numbers of all paths, `OTHER` among them."""
    wall_s = sum(tally.self_s for path, tally in tallies.items() if not _in_background(path))
    totals = _totals(tallies)
    stats = {
        path: tallies[path].stats(totals[path], wall_s)
        for path in sorted(totals, key=lambda path: path.split("/"))
        if path not in (OTHER, BACKGROUND)
    }
    return Window(
        wall_s=wall_s,
        other_s=tallies[OTHER].self_s,
        sections={path: values for path, values in stats.items() if not _in_background(path)},
        background={path: values for path, values in stats.items() if _in_background(path)},
    )


def _totals(tallies: Mapping[str, Tally]) -> dict[str, float]:
    """Return the seconds, with all inside, of every path that ran or has one inside it that ran."""
    totals: dict[str, float] = {}
    for path, tally in tallies.items():
        if tally.count or tally.device_count or tally.self_s:
            while path:
                totals[path] = totals.get(path, 0.0) + tally.self_s
                path = path.rpartition("/")[0]
    return totals


def _in_background(path: str) -> bool:
    return path.split("/")[0] == BACKGROUND


def _share(part_s: float, wall_s: float) -> float:
    return part_s / wall_s if wall_s else 0.0
