import os

import pytest
import torch

from tdmpc.config import Merge, TrainConfig
from tdmpc.keys import ConfigError
from tdmpc.sharing import check_meeting, own_gpu, set_threads

MEAN = Merge(strategy="mean", workers=4, worker=2)


@pytest.fixture
def machine(monkeypatch):
    """Pretend to have so many cores and GPUs; return the numbers of threads and the GPUs that were chosen."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def make(cores=8, gpus=0):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        return chosen

    return make


@pytest.mark.parametrize(
    ("cores", "environ", "threads", "said"),
    [
        (8, {}, 2, "threads=2: 8 cores for 4 workers"),
        (7, {}, 1, "threads=1: 7 cores for 4 workers"),
        (2, {}, 1, "threads=1: 2 cores for 4 workers"),
        (8, {"LOCAL_WORLD_SIZE": "2"}, 4, "threads=4: 8 cores for 2 workers"),
        (8, {"SUBMITIT_EXECUTOR": "slurm"}, 8, "threads=8: 8 cores for 1 workers"),
        (8, {"SUBMITIT_EXECUTOR": "local"}, 2, "threads=2: 8 cores for 4 workers"),
    ],
)
def test_workers_divide_the_cores_that_they_share_and_say_so(machine, cores, environ, threads, said):
    chosen, texts = machine(cores), []
    set_threads(MEAN, "auto", texts.append, environ)
    assert chosen == [threads]
    assert texts == [said]


def test_a_number_of_threads_is_taken_as_it_is_and_a_run_alone_leaves_it_to_torch(machine):
    chosen, texts = machine(), []
    set_threads(Merge(), "auto", texts.append, {})
    assert chosen == []
    for merge in (Merge(), MEAN):
        set_threads(merge, 3, texts.append, {})
    assert chosen == [3, 3]
    assert texts == []


def test_gpus_are_dealt_out_in_turn(machine):
    machine(gpus=3)
    places = [own_gpu(Merge(strategy="mean", workers=5, worker=worker), {}) for worker in range(5)]
    assert [device.index for device in places] == [0, 1, 2, 0, 1]
    assert own_gpu(MEAN, {"LOCAL_RANK": "0"}).index == 0
    assert own_gpu(Merge(), {}) == torch.device("cuda")


def meeting(**merge):
    return TrainConfig(merge={"strategy": "mean", "workers": 4, "exchange": "distributed"} | merge)


def test_workers_that_meet_over_the_network_are_started_by_torchrun(machine):
    machine()
    with pytest.raises(ConfigError) as refusal:
        check_meeting(meeting(), {})
    assert str(refusal.value) == (
        "merge.exchange=distributed: must be started by torchrun, as in torchrun --nproc-per-node 4 scripts/train.py "
        "merge=mean merge.exchange=distributed"
    )
    check_meeting(meeting(), {"MASTER_ADDR": "here"})
    check_meeting(meeting(exchange="files"), {})
    check_meeting(TrainConfig(merge={"exchange": "distributed"}), {})


@pytest.mark.parametrize(
    ("gpus", "control", "fits"), [(0, False, True), (3, True, True), (3, False, False), (2, True, False)]
)
def test_each_that_merges_over_the_network_needs_a_gpu_of_its_own(machine, gpus, control, fits):
    machine(gpus=gpus)
    environ = {"MASTER_ADDR": "here", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    config = meeting(worker=2, control=control)
    if fits:
        check_meeting(config, environ)
        return
    with pytest.raises(ConfigError, match=r"merge need a GPU each, and there are \d; merge.exchange=files"):
        check_meeting(config, environ)


def test_only_the_workers_of_this_machine_need_its_gpus(machine):
    machine(gpus=2)
    for rank in range(4):
        environ = {"MASTER_ADDR": "there", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        check_meeting(meeting(worker=rank, control=False), environ)
