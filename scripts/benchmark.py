"""Measure how fast the code is, and how fast it learns: `suite=ops`, `suite=wallclock`, `suite=regress`.

`python scripts/benchmark.py suite=wallclock --help` lists the keys of a suite.
"""

import sys
from importlib import import_module

import hydra
from omegaconf import DictConfig

from tdmpc.benchmarks.suites import COMMANDS, parse, suite_of
from tdmpc.command_line import from_hydra, one_line_errors, prepare_arguments
from tdmpc.commands import BENCHMARK
from tdmpc.config import BenchmarkConfig


@hydra.main(config_path="../configs", config_name="benchmark", version_base="1.3")
def time_operations(composed: DictConfig) -> None:
    """Check what was asked for, then measure it."""
    with one_line_errors():
        config = from_hydra(BenchmarkConfig, composed)
    # Imported only now: torch and the simulators take seconds, and a wrong key should be refused at once.
    from tdmpc.runs import USER_ERRORS

    with one_line_errors(*USER_ERRORS):
        import_module(f"tdmpc.benchmarks.{config.suite}").run(config)


def run_trainings(suite: str) -> None:
    """Check what was asked for, then carry out the suite, whose runs are commands of train.py."""
    with one_line_errors():
        request = parse(suite, sys.argv[1:])
    from tdmpc.runs import USER_ERRORS

    with one_line_errors(*USER_ERRORS):
        import_module(f"tdmpc.benchmarks.{suite}").run(*request)


if __name__ == "__main__":
    with one_line_errors():
        chosen = suite_of(sys.argv[1:])
    if chosen in COMMANDS:
        run_trainings(chosen)
    else:
        prepare_arguments(BENCHMARK)
        time_operations()
