"""What a person at the terminal sees: a legend once, a line a window, a bar that stays below them."""

import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tdmpc.telemetry.metrics import declaration, legend
from tdmpc.telemetry.recorder import Row

VALUES = (
    "eval/episode_reward",
    "eval/episode_reward_std",
    "eval/episodes",
    "eval/duration_s",
    "train/episode_reward",
    "progress/episodes",
    "train/total_loss",
    "rate/steps_per_s",
)
"""Values that a line shows, as far as its row has them."""

ROUND = "merge/round"
"""The round of merging, in the lines of those windows that had one."""

SECTIONS = {"update": "update", "act": "act", "env/wait": "env"}
"""Sections whose mean and maximum a line shows, the most important first, and what it calls them.

All that `env` does would be a mixture: most of its calls only hand over actions.
"""

LEGEND = textwrap.fill(
    f"{legend((*VALUES, ROUND))}; {', '.join(SECTIONS.values())}: mean|maximum in ms of an update, of choosing "
    "actions and of waiting for the environments; ETA: time left. docs/metrics.md explains every value.",
    width=100,
)
"""Printed once, before the first row."""


class Console:
    """Print one line a row that fits the terminal, and on a terminal a progress bar below.

    Args:
        total: steps of the whole run.
        stream: where to print; without a terminal there is neither bar nor limit to a line.
        plain: no bar on a terminal either.
        label: begins every line, where several runs share the stream; then there is no bar.
        columns: gives the width of the terminal.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO = sys.stdout,
        *,
        plain: bool = False,
        label: str = "",
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._stream, self._total, self._columns = stream, total, columns
        self._terminal = stream.isatty()
        self._legend_shown = False
        self._return = ""
        self._bar: tqdm | None = None
        self._label = f"{label} | " if label else ""
        self._shows_bar = self._terminal and not plain and not label

    def write(self, row: Row) -> None:
        """Print a row as one line."""
        if not self._legend_shown:
            self._legend_shown = True
            self._print(LEGEND)
        self._print(line(row, self._columns() - len(self._label) if self._terminal else None))
        for name in ("eval/episode_reward", "train/episode_reward"):
            if name in row:
                self._return = f"R {row[name]:.0f}"

    def announce(self, text: str) -> None:
        """Print a line of text."""
        self._print(text)

    def add_video(self, step: int, path: Path) -> None:
        """Say where it is."""
        self._print(f"video: {path}")

    def advance(self, step: int, eta_s: float | None, doing: str = "") -> None:
        """Move the bar."""
        if not self._shows_bar:
            return
        if self._bar is None:
            # Only now that the run has begun: what is refused before is a line of its own.
            form = "{percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} steps{postfix}"
            # Without a least number of steps, for what is done between steps moves it as well.
            self._bar = tqdm(total=self._total, file=self._stream, dynamic_ncols=True, bar_format=form, miniters=0)
        eta = "" if eta_s is None else f"ETA {duration(eta_s)}"
        self._bar.set_postfix_str(", ".join(part for part in (doing, eta, self._return) if part), refresh=False)
        self._bar.update(min(step, self._total) - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        # In one piece, or it would come apart among the lines of others.
        tqdm.write("\n".join(self._label + line for line in text.split("\n")), file=self._stream)
        self._stream.flush()


def line(row: Row, columns: int | None) -> str:
    """Return a row as one line of at most `columns` characters, leaving out what matters least.

    What always stays is step, return, episodes, loss, rate and ETA. A line without a kind is a window of training.
    """
    kind = [] if row["kind"] == "train" else [row["kind"]]
    essential = [f"{row['step']:>9,}", *kind, *_values(row)]
    if "progress/eta_s" in row:
        essential.append(f"ETA {duration(row['progress/eta_s'])}")
    cells = [*essential]
    for section in (*_round(row), *_sections(row)):
        longer = [*cells, section]
        if columns is None or len(" ".join(longer)) <= columns:
            cells = longer
    return " ".join(cells)[:columns]


def duration(seconds: float) -> str:
    """Return seconds as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _values(row: Row) -> list[str]:
    return [_value(row, name) for name in VALUES if name in row]


def _round(row: Row) -> list[str]:
    return [_value(row, ROUND)] if ROUND in row else []


def _value(row: Row, name: str) -> str:
    metric = declaration(name)
    return f"{metric.short} {metric.form.format(row[name])}"


def _sections(row: Row) -> list[str]:
    cells = []
    for section, short in SECTIONS.items():
        if f"time/{section}/mean_s" in row:
            mean, most = row[f"time/{section}/mean_s"], row[f"time/{section}/max_s"]
            cells.append(f"{short} {1000 * mean:.0f}|{1000 * most:.0f}")
    return cells
