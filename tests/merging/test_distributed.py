import multiprocessing
import os
import socket
import time
from contextlib import suppress
from multiprocessing.pool import AsyncResult

import pytest
import torch

from tdmpc.merging.distributed import TorchDistributed
from tdmpc.merging.exchange import ExchangeError
from tdmpc.merging.messages import Header, Totals, UnusableMessage
from tdmpc.merging.strategies import Nesterov
from tests.merging.builders import FINGERPRINT, merge, publish

# A fresh process whose children have torch imported already.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.merging.test_distributed"])

MEMBERS = (1, 3)  # worker 2, which runs beside them, doesn't merge and does nothing here


def connect(worker, port, said=None, fingerprint=FINGERPRINT, timeout_s=20.0):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    announce = (said if said is not None else []).append
    device = torch.device("cpu")
    return TorchDistributed(worker, MEMBERS, fingerprint, device=device, timeout_s=timeout_s, announce=announce)


def state(worker):
    return {
        "weight": torch.full((2, 3), float(worker)).T,  # not contiguous
        "half": torch.tensor([worker], dtype=torch.bfloat16),
        "count": torch.tensor(worker),
        "flag": torch.tensor([worker == 1]),
        "empty": torch.empty(0),
    }


def train(worker, port):
    """Do four rounds, in the third of which worker 3 has lost its weights; return what came of it."""
    said = []
    exchange = connect(worker, port, said)
    exchange.join(resuming=False, overwrite=False)
    live, strategy, took_part = state(worker), Nesterov(lambda name: name == "weight", lr=1.0, momentum=0.5), []
    strategy.begin(state(2))
    for round in range(1, 5):
        if worker == 3 and round == 3:
            live["half"].fill_(torch.nan)
        took_part.append(merge(exchange, strategy, live, round))
    costs = exchange.take_costs()
    exchange.report(Totals())
    exchange.finish(Totals())
    exchange.close()
    plain = {name: tensor.double().tolist() for name, tensor in live.items()}
    return plain, took_part, said, exchange.group, (costs.skipped, costs.read_bytes)


def share(worker, port):
    """Do three rounds, in the second of which worker 3 gives what cannot be used; return what came of it."""
    said, read = [], []
    exchange = connect(worker, port, said)
    exchange.join(resuming=False, overwrite=False)
    for round in range(1, 4):
        value = torch.nan if (worker, round) == (3, 2) else 10.0 * worker + round
        exchange.share(Header(worker, round, 100 * round, 0, None), {"number": torch.full((worker,), value)})
        publish(exchange, round, {})
        exchange.headers(round)
        for giver, number in exchange.shared(round, {}):
            with suppress(UnusableMessage):
                episodes = exchange.read_shared(giver, number, lambda episodes: None)
                read.append((giver, number, episodes["number"].tolist()))
    costs = exchange.take_costs()
    exchange.close()
    return read, said, (costs.skipped, costs.read_bytes)


def join_with(worker, port, fingerprints):
    return refusal(lambda: connect(worker, port, fingerprint=fingerprints[worker]).join(False, False))


def end_early(worker, port):
    exchange = connect(worker, port)
    exchange.join(resuming=False, overwrite=False)
    if worker == 3:
        exchange.close()
        return None
    publish(exchange, 1)
    return refusal(lambda: exchange.headers(1))


def hang(worker, port, done):
    exchange = connect(worker, port, timeout_s=2.0)
    exchange.join(resuming=False, overwrite=False)
    if worker == 3:
        deadline = time.monotonic() + 30
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return None
    publish(exchange, 1)
    refused = refusal(lambda: exchange.headers(1))
    done.touch()
    return refused


def be_in_rounds(worker, port, rounds):
    exchange = connect(worker, port)
    exchange.join(resuming=False, overwrite=False)
    publish(exchange, rounds[worker])
    return refusal(lambda: exchange.headers(1))


def have_models(worker, port, sizes):
    exchange = connect(worker, port)
    exchange.join(resuming=False, overwrite=False)
    publish(exchange, 1, {"x": torch.zeros(sizes[worker])})
    return refusal(lambda: exchange.headers(1))


def refusal(action):
    try:
        action()
    except ExchangeError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def both():
    """Run a function as both workers at the same time, in real processes; return what either returns."""
    with processes.Pool(len(MEMBERS), maxtasksperchild=1) as pool:

        def run(function, *arguments):
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            results: list[AsyncResult] = [pool.apply_async(function, (worker, port, *arguments)) for worker in MEMBERS]
            return [result.get(timeout=60) for result in results]

        yield run


def test_workers_end_with_the_same_bits_and_skip_ruined_weights_alike(both):
    one, three = both(train)
    assert one[0] == three[0]
    assert one[0]["half"] == [2]
    assert one[0]["count"] == 3
    assert one[0]["flag"] == [1]
    for _, took_part, said, group, costs in (one, three):
        assert took_part == [[1, 3], [1, 3], [1], [1, 3]]
        assert said == ["merging without worker 3: its message is not finite: half"]
        assert group == one[3] != ""
        assert costs == (1, 7 * (6 * 4 + 2 + 8 + 1))


def test_workers_read_the_episodes_of_all_without_a_folder(both):
    one, three = both(share)
    assert one == three
    read, said, costs = one
    assert read == [
        (1, 1, [11]), (3, 1, [31] * 3),
        (1, 2, [12]),
        (1, 3, [13]), (3, 3, [33] * 3),
    ]  # fmt: skip
    assert said == ["merging without the episodes of worker 3: its message is not finite: number"]
    assert costs == (1, 4 * 9)


def test_different_settings_are_refused_on_joining(both):
    fingerprints = {1: FINGERPRINT, 3: FINGERPRINT | {"model_size": 19}}
    expected = "merging: workers 1 and 3 have different settings (model_size: 5 and 19)"
    assert both(join_with, fingerprints) == [expected] * 2


def test_a_worker_that_ends_before_the_others_stops_them_in_one_line(both):
    refused, _ = both(end_early)
    assert refused.startswith("merging: a worker has ended or didn't come within 20 s (")
    assert "\n" not in refused


def test_a_worker_that_hangs_is_given_up_after_the_timeout(both, tmp_path):
    refused, _ = both(hang, tmp_path / "done")
    assert refused.startswith("merging: a worker has ended or didn't come within 2 s (")


def test_another_round_is_refused_by_all(both):
    refusals = both(be_in_rounds, {1: 1, 3: 2})
    assert refusals == ["merging: worker 3 is in round 2, not 1"] * 2


def test_another_model_is_refused_by_all(both):
    refusals = both(have_models, {1: 4, 3: 5})
    assert refusals == [
        "merging: worker 3 has another model: x is float32 [5], not float32 [4]",
        "merging: worker 1 has another model: x is float32 [4], not float32 [5]",
    ]


def test_without_torchrun_it_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    exchange = TorchDistributed(0, [0, 1], {}, device=torch.device("cpu"), timeout_s=1, announce=print)
    with pytest.raises(ExchangeError, match="start them by torchrun"):
        exchange.join(resuming=False, overwrite=False)
    exchange.close()
