"""Merging: a round of two workers that meet through a folder."""

import shutil
from collections.abc import Iterator
from contextlib import closing

from tdmpc.benchmarks.bench import Bench
from tdmpc.benchmarks.results import Record
from tdmpc.merging.exchange import Filesystem
from tdmpc.merging.messages import Header
from tdmpc.merging.strategies import Mean, RunningMean, State, copy_into
from tdmpc.training.trainer import Trainer

OWN, PEER = WORKERS = (0, 1)


class Group:
    """Two workers of the same weights, of which one is timed and never waits.

    Args:
        own: the worker that is timed.
        peer: the other one.
        live: weights that are merged.
    """

    def __init__(self, own: Filesystem, peer: Filesystem, live: State) -> None:
        self._own, self._peer, self._live = own, peer, live
        self._strategy, self._round = Mean(), 0
        for member in (own, peer):
            member.join(resuming=False, overwrite=False)

    def prepare(self) -> None:
        """Let the other one publish the next round."""
        self._round += 1
        self._peer.publish(self._header(PEER), self._live)

    def merge(self) -> None:
        """Publish, read what both published, and take over the mean."""
        self._own.publish(self._header(OWN), self._live)
        headers, mean = self._own.headers(self._round), RunningMean()
        weights = self._strategy.weights([header.recent_return for header in headers])
        for header, weight in zip(headers, weights, strict=True):
            mean.add(self._own.read(header), weight)
        copy_into(self._live, self._strategy.step(self._live, mean.result()))

    def _header(self, worker: int) -> Header:
        return Header(worker, self._round, step=self._round, updates=self._round, recent_return=None)


def time_merge(bench: Bench, model_size: int, trainer: Trainer) -> Iterator[Record]:
    """Time a round of merging the weights by their mean; `bytes` are those of the states that are read."""
    folder, live = bench.folder / "group", trainer.agent.model.state_dict()
    options = {"every": 1, "sync": True, "timeout_s": 0.0, "max_age": 0, "announce": print}
    own, peer = (Filesystem(folder, worker, WORKERS, {}, **options) for worker in WORKERS)
    with closing(own), closing(peer):
        group = Group(own, peer, live)
        timing = bench.stopwatch.time(group.merge, group.prepare)
    shutil.rmtree(folder)
    size = len(WORKERS) * sum(tensor.nbytes for tensor in live.values())
    yield bench.record("merge", timing, model_size=model_size, variant="mean", bytes=size)
