"""Workers that meet, and a clock for them."""

import torch

from tdmpc.merging.exchange import Filesystem
from tdmpc.merging.messages import Header, UnusableMessage
from tdmpc.merging.strategies import RunningMean, copy_into

FINGERPRINT = {"task": "walker-walk", "model_size": 5}


class FakeTime:
    """A clock that moves when somebody sleeps; what is planned `at` a second happens on its way there."""

    def __init__(self):
        self.now, self._plans = 100.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        due = [plan for plan in self._plans if plan[0] <= self.now]
        self._plans = [plan for plan in self._plans if plan not in due]
        for _, action in due:
            action()

    def after(self, seconds, action):
        self._plans.append((self.now + seconds, action))


def filesystem(folder, worker, time=None, members=(0, 1, 2), said=None, fingerprint=FINGERPRINT, **settings):
    """Make the exchange of a worker that hasn't joined."""
    time = time or FakeTime()
    defaults = {"every": 100, "sync": True, "timeout_s": 10.0, "max_age": 1000}
    announce = (said if said is not None else []).append
    return Filesystem(
        folder,
        worker,
        members,
        fingerprint,
        announce=announce,
        clock=time.clock,
        sleep=time.sleep,
        **(defaults | settings),
    )


def publish(exchange, round, state=None, step=None, recent_return=None):
    step = 100 * round if step is None else step
    state = {"x": torch.ones(1)} if state is None else state
    exchange.publish(Header(exchange.worker, round, step, updates=step // 2, recent_return=recent_return), state)


def merge(exchange, strategy, live, round, recent_return=None):
    """Do a round as a merger does, in place; return whose messages took part."""
    publish(exchange, round, live, recent_return=recent_return)
    headers = exchange.headers(round)
    mean, workers = RunningMean(), []
    for header, weight in zip(headers, strategy.weights([h.recent_return for h in headers]), strict=True):
        try:
            mean.add(exchange.read(header), weight)
            workers.append(header.worker)
        except UnusableMessage:
            continue
    copy_into(live, strategy.step(live, mean.result()))
    return workers
