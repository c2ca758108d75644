"""Draw runs: `python scripts/plot.py runs/walker-walk/default/seed-*`; `--help` says what and how."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tdmpc.command_line import one_line_errors
from tdmpc.keys import ConfigError

DESCRIPTION = """\
Draw runs as PNG files: the return against steps and against wall-clock time, the losses, the share of time that every
section of the loop took, and the rates.

Runs that have the same task and exp_name are seeds of one experiment. They become one line, their mean, in a band from
their least to their greatest value, as far as all of them have come; other runs are overlaid. The directory of a group
of workers stands for their runs: those that merge are one such line, and the control beside them is another."""
EXAMPLES = """\
examples:
  python scripts/plot.py runs/walker-walk/default/seed-1
  python scripts/plot.py runs/walker-walk/*/seed-* --out comparison
  python scripts/plot.py runs/walker-walk/merged/seed-1    # workers, and their control"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are the one line that the other scripts' are."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise ConfigError(f"{message}; --help lists what there is")


def arguments_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES, formatter_class=form)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path, help="the directory of a run")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where the files go (default: the run's own directory, or plots/ of several)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what was asked for and list the files."""
    with one_line_errors():
        options = arguments_parser().parse_args(arguments)
    # Imported only now: matplotlib takes a second, and a wrong argument should be refused at once.
    from tdmpc.telemetry.history import HistoryError
    from tdmpc.telemetry.plots import plot_runs

    out = options.out or (options.runs[0] if len(options.runs) == 1 else Path("plots"))
    with one_line_errors(HistoryError, OSError):
        plotted = plot_runs(options.runs, out)
    print("\n".join([*plotted.notes, *(f"wrote {path}" for path in plotted.written)]))


if __name__ == "__main__":
    main()
