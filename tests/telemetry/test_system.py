import subprocess
import sys

import numpy as np
import psutil
import torch

from tdmpc.telemetry.metrics import declaration
from tdmpc.telemetry.system import SystemMetrics


def test_memory_and_cpu_use_of_this_process_are_measured():
    metrics = SystemMetrics(torch.device("cpu"), replay_bytes=lambda: 7)
    before = metrics()
    ballast = np.ones(64 * 2**20, np.uint8)
    after = metrics()
    assert after["system/rss_bytes"] - before["system/rss_bytes"] > 0.9 * len(ballast)
    assert after["system/replay_bytes"] == 7
    assert 0 < after["system/cpu_percent"] <= 100 * psutil.cpu_count()
    assert all(declaration(name).unit for name in after)


def test_children_count():
    ballast = "x = b'1' * 2**26; sum(range(10**7)); print(flush=True); input()"
    metrics = SystemMetrics(torch.device("cpu"), replay_bytes=lambda: 0)
    alone = metrics()
    command = [sys.executable, "-c", ballast]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together = metrics()
        child.communicate(b"\n")
    assert together["system/rss_bytes"] - alone["system/rss_bytes"] > 2**26
    assert together["system/cpu_percent"] > 10  # this process only waits
    assert metrics()["system/cpu_percent"] >= 0
