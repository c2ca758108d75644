"""What a run says at its end: where the time went, what held it up, what came of it."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tdmpc.telemetry.window import OTHER, SectionStats, Window


def table(total: Window) -> str:
    """Return the sections of a whole run as a table, the longest first at every level.

    Where calls were timed on a device as well, its time stands beside the host's.
    """
    device = f"{'device':>12}" if any(_on_device(stats) for stats in total.sections.values()) else ""
    lines = [f"{'section':<28}{'total':>10}{'share':>8}{'calls':>10}{'mean':>15}{'max':>14}{device}"]
    lines += [_table_line(path, total.sections[path]) for path in _by_time(total)]
    if total.wall_s > 0:
        lines.append(f"{OTHER:<28}{total.other_s:>8.1f} s{total.other_share:>8.1%}")
    return "\n".join(lines)


def bottleneck(total: Window) -> str:
    """Return the work whose own time is largest, and by Amdahl's law what the run could gain without it.

    Own time is the time in a section and in none inside it: removing it leaves the sections inside. A section that is
    inside another as well (`act/plan` and `evaluate/act/plan`) is the same work in both places. Where a device was
    timed, its time counts: the host's is often that of waiting for what another section has begun.
    """
    if not total.sections or total.wall_s <= 0:
        return "nothing was measured"
    own: dict[str, float] = defaultdict(float)
    places: dict[str, list[str]] = defaultdict(list)
    for path in total.sections:
        work = _work(path, total)
        own[work] += _own_s(path, total)
        places[work] += [path] if path != work else []
    most = max(own, key=lambda work: own[work])
    share = own[most] / total.wall_s
    gain = 1 / (1 - share) if share < 1 else float("inf")
    also = f" ({', '.join(places[most])} included)" if places[most] else ""
    return (
        f"bottleneck: {most} takes {share:.0%} of the time{also}; "
        f"without it the run would be up to {gain:.1f} times as fast"
    )


def report(total: Window, overhead_s: float) -> str:
    """Return table, bottleneck and the cost of measuring, for people."""
    share = overhead_s / total.wall_s if total.wall_s else 0.0
    return f"{table(total)}\n{bottleneck(total)}\nmeasuring took about {overhead_s:.2f} s ({share:.2%})"


def write_summary(path: Path, total: Window, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`: what is given, and the sections of the whole run; replaced as a whole or not at all."""
    sections = {name: asdict(stats) for name, stats in total.sections.items()}
    content = {
        **summary,
        "wall_s": total.wall_s,
        "other_s": total.other_s,
        "sections": sections,
        "bottleneck": bottleneck(total),
    }
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(content, indent=2))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _by_time(total: Window) -> list[str]:
    """Return the paths, each before those inside it, siblings by their time."""

    def key(path: str) -> list[tuple[float, str]]:
        parts = path.split("/")
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        return [(-total.sections[prefix].total_s, prefix) for prefix in prefixes]

    return sorted(total.sections, key=key)


def _work(path: str, total: Window) -> str:
    """Return the shortest end of a path that is a section as well."""
    parts = path.split("/")
    ends = ("/".join(parts[begin:]) for begin in reversed(range(len(parts))))
    return next(end for end in ends if end in total.sections)


def _own_s(path: str, total: Window) -> float:
    """Return the seconds in a section and in none inside it, the device's where it was timed."""
    stats = total.sections[path]
    if not _on_device(stats):
        return stats.self_s
    inside = [inner for name, inner in total.sections.items() if name.rpartition("/")[0] == path]
    return max(0.0, _device_s(stats) - sum(map(_device_s, inside)))


def _on_device(stats: SectionStats) -> bool:
    return stats.device_total_s is not None


def _device_s(stats: SectionStats) -> float:
    return stats.device_total_s or 0.0


def _table_line(path: str, stats: SectionStats) -> str:
    depth = path.count("/")
    name = "  " * depth + path.rpartition("/")[2]
    line = f"{name:<28}{stats.total_s:>8.1f} s{stats.share:>8.1%}{stats.count:>10,}"
    if stats.mean_s is None or stats.max_s is None:
        return line
    device = f"{stats.device_total_s:>10.1f} s" if stats.device_total_s is not None else ""
    return f"{line}{1000 * stats.mean_s:>12.2f} ms{1000 * stats.max_s:>11.0f} ms{device}"
