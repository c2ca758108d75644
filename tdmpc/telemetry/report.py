"""What a run says at its end: where the time went, what held it up, what came of it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tdmpc.telemetry.window import OTHER, SectionStats, Window


def table(total: Window) -> str:
    """Return the sections of a whole run as a table, the longest first at every level."""
    lines = [f"{'section':<28}{'total':>10}{'share':>8}{'calls':>10}{'mean':>15}{'max':>14}"]
    lines += [_table_line(path, total.sections[path]) for path in _by_time(total)]
    if total.wall_s > 0:
        lines.append(f"{OTHER:<28}{total.other_s:>8.1f} s{total.other_share:>8.1%}")
    return "\n".join(lines)


def bottleneck(total: Window) -> str:
    """Return the section whose own time is largest, and by Amdahl's law what the run would gain without it.

    Own time is the time in a section and in none inside it: removing it leaves the sections inside.
    """
    own = {path: stats.self_s for path, stats in total.sections.items()}
    if not own or total.wall_s <= 0:
        return "nothing was measured"
    path = max(own, key=lambda name: own[name])
    share = own[path] / total.wall_s
    gain = 1 / (1 - share) if share < 1 else float("inf")
    return f"bottleneck: {path} takes {share:.0%} of the time; without it the run would be {gain:.1f} times as fast"


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
    part.write_text(json.dumps(content, indent=2))
    part.replace(path)


def _by_time(total: Window) -> list[str]:
    """Return the paths, each before those inside it, siblings by their time."""

    def key(path: str) -> list[tuple[float, str]]:
        parts = path.split("/")
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        return [(-total.sections[prefix].total_s, prefix) for prefix in prefixes]

    return sorted(total.sections, key=key)


def _table_line(path: str, stats: SectionStats) -> str:
    depth = path.count("/")
    name = "  " * depth + path.rpartition("/")[2]
    line = f"{name:<28}{stats.total_s:>8.1f} s{stats.share:>8.1%}{stats.count:>10,}"
    if stats.mean_s is None or stats.max_s is None:
        return line
    return f"{line}{1000 * stats.mean_s:>12.2f} ms{1000 * stats.max_s:>11.0f} ms"
