"""Which part of a machine is a worker's: its threads and its GPU."""

import os
from collections.abc import Callable, Mapping

import torch

from tdmpc.config import Merge, TrainConfig
from tdmpc.keys import ConfigError

Environ = Mapping[str, str]


def set_threads(
    merge: Merge, threads: int | str, announce: Callable[[str], None], environ: Environ = os.environ
) -> None:
    """Set the number of torch's threads; `auto` divides the cores among workers, and says so."""
    if threads != "auto":
        torch.set_num_threads(int(threads))
    elif merge.merges:
        cores, workers = len(os.sched_getaffinity(0)), _workers_here(merge, environ)
        torch.set_num_threads(max(1, cores // workers))
        announce(f"threads={torch.get_num_threads()}: {cores} cores for {workers} workers")


def own_gpu(merge: Merge, environ: Environ = os.environ) -> torch.device:
    """Return the GPU of a run, from now on the current one; those of a machine are dealt out to workers in turn."""
    if not merge.merges:
        return torch.device("cuda")
    place = int(environ.get("LOCAL_RANK", merge.worker))
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_meeting(config: TrainConfig, environ: Environ = os.environ) -> None:
    """Refuse workers that could not meet over the network.

    Raises:
        ConfigError: they weren't started by torchrun, or have too few GPUs.
    """
    merge = config.merge
    if not merge.merges or merge.exchange == "files":
        return
    if "MASTER_ADDR" not in environ:
        raise ConfigError(
            "merge.exchange=distributed: must be started by torchrun, as in torchrun --nproc-per-node "
            f"{merge.workers} scripts/train.py merge={merge.strategy} merge.exchange=distributed"
        )
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    first = merge.worker - int(environ.get("LOCAL_RANK", 0))
    members = set(merge.members) & set(range(first, first + _workers_here(merge, environ)))
    if 0 < gpus < len(members):
        raise ConfigError(
            f"merge.exchange=distributed: {len(members)} workers that merge need a GPU each, and there are {gpus}; "
            "merge.exchange=files lets them share"
        )


def _workers_here(merge: Merge, environ: Environ) -> int:
    """Return how many workers of the group share this machine, or the part of it that is this job's alone."""
    if environ.get("SUBMITIT_EXECUTOR") == "slurm":
        return 1
    return int(environ.get("LOCAL_WORLD_SIZE", merge.workers or 1))
