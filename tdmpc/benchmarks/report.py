"""Where the results of a suite go, and what is said of them."""

import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from tdmpc.benchmarks.compare import MACHINE_KEYS, compare
from tdmpc.benchmarks.results import HEADER, Record, Results
from tdmpc.config import UNSAFE_IN_A_NAME, BenchmarkConfig
from tdmpc.keys import require

FOLDER = Path("runs/benchmark")


def baseline_of(config: BenchmarkConfig) -> Results | None:
    """Read the earlier results, if any.

    Raises:
        ConfigError: they cannot be read.
    """
    return None if config.baseline is None else Results.read(Path(config.baseline))


def out_file(config: BenchmarkConfig) -> Path:
    """Return the file that the results go to, which does not exist; its folder does, after this.

    Raises:
        ConfigError: the file that was asked for exists, or its folder cannot be made.
    """
    out = _unused(config) if config.out is None else Path(config.out)
    require(not out.exists(), "out", out, "exists already; must be a new file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        require(False, "out", out, f"must be in a folder that can be made ({error.strerror})")
    return out


def print_machine(machine: Mapping[str, Any]) -> None:
    """Print what is measured on."""
    peaks = ", ".join(f"{peak:.0f} GFLOP/s in {name}" for name, peak in machine["peak_gflops_per_s"].items())
    print("; ".join(f"{name} {machine[name]}" for name in MACHINE_KEYS))
    print(f"peak (linear layer of 512 to 512 numbers on 2048 rows): {peaks}\n")


def print_records(records: Iterable[Record]) -> list[Record]:
    """Print every record when it comes, and return all."""
    print(HEADER)
    printed = []
    for record in records:
        print(record.line(), flush=True)
        printed.append(record)
    return printed


def finish(results: Results, baseline: Results | None, out: Path, config: BenchmarkConfig) -> None:
    """Write the results and print what they come to beside the baseline.

    Raises:
        SystemExit: something is slower than in the baseline, and `fail_if_slower` is set.
    """
    results.write(out)
    print(f"\nwrote {out}")
    if baseline is None:
        return
    comparison = compare(baseline, results, config.slower)
    print(f"\ncompared with {config.baseline} of {baseline.machine.get('date')}")
    print("\n".join(comparison.lines()))
    if config.fail_if_slower and comparison.slower:
        raise SystemExit(1)


def _unused(config: BenchmarkConfig) -> Path:
    task = UNSAFE_IN_A_NAME.sub("-", config.task).strip("-.")
    name = f"{config.suite}-{task}-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (FOLDER / f"{name}.json" for name in names) if not path.exists())
