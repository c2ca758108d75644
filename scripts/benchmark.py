"""Measure how fast the code is: `python scripts/benchmark.py suite=ops task=walker-walk`; `--help` lists every key."""

from importlib import import_module

import hydra
from omegaconf import DictConfig

from tdmpc.command_line import from_hydra, one_line_errors, prepare_arguments
from tdmpc.commands import BENCHMARK
from tdmpc.config import BenchmarkConfig


@hydra.main(config_path="../configs", config_name="benchmark", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Check what was asked for, then measure it."""
    with one_line_errors():
        config = from_hydra(BenchmarkConfig, composed)
    # Imported only now: torch and the simulators take seconds, and a wrong key should be refused at once.
    from tdmpc.runs import USER_ERRORS

    with one_line_errors(*USER_ERRORS):
        import_module(f"tdmpc.benchmarks.{config.suite}").run(config)


if __name__ == "__main__":
    prepare_arguments(BENCHMARK)
    main()
