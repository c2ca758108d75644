"""Where rows go: the console, `metrics.jsonl`, `eval.csv`."""

import csv
import json
import sys
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tdmpc.telemetry.recorder import Row

COLUMNS = {
    "eval/episode_reward": "R {:.1f}",
    "eval/episode_reward_std": "± {:.1f}",
    "eval/episodes": "episodes {:.0f}",
    "eval/episode_length": "of {:.0f} steps",
    "eval/duration_s": "in {:.0f} s",
    "train/episode_reward": "R {:.1f}",
    "train/total_loss": "loss {:.3f}",
    "train/pi_scale": "scale {:.2f}",
    "progress/episodes": "episodes {:.0f}",
    "progress/failed_episodes": "failed {:.0f}",
    "progress/updates": "updates {:.0f}",
    "rate/steps_per_s": "{:.1f} steps/s",
}
"""What the console shows of a row, and how; values that are 0 or absent are left out."""


class Console:
    """A progress bar with one line above it for every row.

    Args:
        total: steps of the whole run.
        stream: where to print; without a terminal there is no bar, only the lines.
    """

    def __init__(self, total: int, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._total = total
        self._bar = tqdm(
            total=total,
            file=stream,
            disable=not stream.isatty(),
            unit="step",
            dynamic_ncols=True,
            smoothing=0.05,
            bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )

    def write(self, row: Row) -> None:
        """Print a row as one line."""
        self._print(f"{row['step']:>9,}  {row['elapsed_s']:>7.1f}s  {row['kind']:<8}  {_columns(row)}")
        for name in ("eval/episode_reward", "train/episode_reward"):
            if name in row:
                self._bar.set_postfix_str(f"R {row[name]:.0f}")

    def announce(self, text: str) -> None:
        """Print a line of text."""
        self._print(text)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(min(step, self._total) - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()

    def _print(self, line: str) -> None:
        tqdm.write(line, file=self._stream)
        self._stream.flush()


def _columns(row: Row) -> str:
    return "  ".join(form.format(row[name]) for name, form in COLUMNS.items() if row.get(name))


class JsonLines:
    """Append every row to a file, one JSON object a line.

    Args:
        path: the file, made with the first row.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append a row and hand it to the operating system at once."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def announce(self, text: str) -> None:
        """Ignore text."""

    def advance(self, step: int) -> None:
        """Ignore steps."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EvalCsv:
    """Write evaluations as `step,episode_reward`, the form of the published results.

    Args:
        path: the file, made with its header.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)
        if self._file.tell() == 0:
            self._append("step", "episode_reward")

    def write(self, row: Row) -> None:
        """Append the row of an evaluation; ignore others."""
        if row["kind"] == "eval":
            self._append(row["step"], row["eval/episode_reward"])

    def announce(self, text: str) -> None:
        """Ignore text."""

    def advance(self, step: int) -> None:
        """Ignore steps."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, *cells: object) -> None:
        self._writer.writerow(cells)
        self._file.flush()
