"""Evaluate saved weights: `python scripts/evaluate.py task=walker-walk checkpoint=runs/walker-walk/default/seed-1`."""

import sys

import hydra
from omegaconf import DictConfig

from tdmpc.command_line import from_hydra, one_line_errors, prepare_arguments
from tdmpc.commands import EVALUATE
from tdmpc.config import EvaluateConfig
from tdmpc.multirun import run_job, watched


@hydra.main(config_path="../configs", config_name="evaluate", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Do an evaluation, which may be a job of a multirun."""
    run_job(lambda: run(composed))


def run(composed: DictConfig) -> None:
    """Check what was asked for, then run it."""
    with one_line_errors():
        config = from_hydra(EvaluateConfig, composed)
    # Imported only now: torch and the simulators take seconds, and a wrong key should be refused at once.
    from tdmpc.runs import USER_ERRORS, evaluate

    with one_line_errors(*USER_ERRORS):
        evaluate(config)


if __name__ == "__main__":
    prepare_arguments(EVALUATE)
    with watched(sys.argv[1:]):
        main()
