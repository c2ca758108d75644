"""Train a TD-MPC2 agent: `python scripts/train.py task=walker-walk num_envs=4`; `--help` lists every key."""

import sys

import hydra
from omegaconf import DictConfig

from tdmpc.command_line import from_hydra, one_line_errors, prepare_arguments
from tdmpc.commands import TRAIN
from tdmpc.config import TrainConfig
from tdmpc.multirun import label, run_job, watched


@hydra.main(config_path="../configs", config_name="train", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Do a run, which may be a job of a multirun."""
    run_job(lambda: run(composed))


def run(composed: DictConfig) -> None:
    """Check what was asked for, then run it."""
    with one_line_errors():
        config = from_hydra(TrainConfig, composed)
    # Imported only now: torch and the simulators take seconds, and a wrong key should be refused at once.
    from tdmpc.runs import USER_ERRORS, train

    with one_line_errors(*USER_ERRORS):
        train(config, label(config.merge))


if __name__ == "__main__":
    prepare_arguments(TRAIN)
    with watched(sys.argv[1:]):
        main()
