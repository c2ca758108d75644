"""What a measurement was made on: it means little without."""

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[2]


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what tells machines, installations and states of the code apart, ready for JSON."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def cores() -> int:
    """Return the number of cores that this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Return the commit of the code, with `-dirty` where files differ from it; None where git does not know."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
