"""What a run has to do with the others of its group: the merger by which they meet, and the table at their end.

The group shares a directory::

    <run_root>/<task>/<exp_name>/seed-<seed>/
        worker-<i>/       runs
        exchange/         where they meet, with merge.exchange=files; see merging/messages.py
        group.txt         a table of all workers, written when the last one ends
        group.json        the same
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tdmpc.agent.agent import TDMPC2
from tdmpc.config import Merge, TrainConfig
from tdmpc.merging.distributed import TorchDistributed
from tdmpc.merging.exchange import Exchange, Filesystem, locked, still_running
from tdmpc.merging.experience import Experience, NoExperience
from tdmpc.merging.merger import Abandoned, Control, Merger, NoMerge, Rounds
from tdmpc.merging.messages import Status, read_statuses
from tdmpc.merging.strategies import Elastic, Mean, Nesterov, Strategy, Weighted
from tdmpc.replay import ReplayBuffer
from tdmpc.replay_episodes import ReplayEpisodes
from tdmpc.telemetry.console import duration
from tdmpc.telemetry.timers import Timers

Announce = Callable[[str], None]


def build_merger(
    config: TrainConfig,
    run: Path,
    agent: TDMPC2,
    replay: ReplayBuffer,
    seed_steps: int,
    timers: Timers,
    announce: Announce,
    should_stop: Callable[[], bool],
) -> NoMerge:
    """Build what a run merges with.

    Args:
        config: of the run.
        run: its directory.
        agent: whose weights are merged.
        replay: whose episodes are shared.
        seed_steps: steps of the seeding phase.
        timers: sections `publish`, `wait`, `read` and `apply`.
        announce: told what a person should know.
        should_stop: asked while waiting for others.
    """
    merge = config.merge
    if not merge.merges or (merge.is_control and merge.exchange == "distributed"):
        return NoMerge()
    start = seed_steps if merge.start is None else merge.start
    exchange = _exchange(config, run, agent, start, announce, should_stop)
    if merge.is_control:
        announce("control: worker 0 trains alone, for comparison")
        return Control(exchange, announce)
    if len(merge.members) == 1:
        announce(f"warning: merging: worker {merge.worker} is the only one that merges; see merge.control")
    return Merger(
        exchange,
        _strategy(merge, agent),
        (lambda: {}) if merge.share == "experience" else lambda: agent.merge_state(merge.moments),
        Rounds(start, merge.every, config.steps),
        merge.worker,
        announce=announce,
        section=timers,
        common_start=merge.shared_init or config.checkpoint is not None,
        collective=merge.exchange == "distributed",
        experience=_experience(merge, exchange, replay),
    )


def announce_end(config: TrainConfig, run: Path, announce: Announce) -> None:
    """Print a table of the group and write it beside the workers, unless one of them is still running.

    Of workers that end at the same moment, one does.
    """
    exchange = run.parent / "exchange"
    if not config.merge.merges or config.merge.exchange != "files" or still_running(exchange):
        return
    try:
        with locked(exchange / "group.lock", announce):
            text = _write_table(config.merge, run.parent, read_statuses(exchange))
    except OSError as error:
        announce(f"warning: group.txt not written ({error})")
        return
    if text:
        announce(f"\n{text}pictures: python scripts/plot.py {run.parent}")


def _write_table(merge: Merge, directory: Path, statuses: Mapping[int, Status]) -> str:
    """Write the table and return it; nothing where it is there already."""
    path, text = directory / "group.txt", group_table(merge, statuses) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return ""
    settings = {name: value for name, value in asdict(merge).items() if name != "worker"}
    content = {"merge": settings, "workers": {worker: asdict(status) for worker, status in statuses.items()}}
    (directory / "group.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    return text


def group_table(merge: Merge, statuses: Mapping[int, Status]) -> str:
    """Return what became of every worker, as a table for people."""
    kind = (
        f"merge={merge.strategy}" if merge.share == "weights" else f"merge={merge.strategy} merge.share={merge.share}"
    )
    head = f"{'worker':>6}{'return':>10}{'steps':>12}{'updates':>12}{'merges':>8}{'time':>10}  {kind}"
    workers = range(merge.workers or 0)
    return "\n".join([head, *(_table_line(merge, worker, statuses.get(worker)) for worker in workers)])


def _table_line(merge: Merge, worker: int, status: Status | None) -> str:
    if status is None:
        return f"{worker:>6}  did not start"
    totals = status.totals
    value = "-" if totals.last_return is None else f"{totals.last_return:.1f}"
    counts = f"{totals.steps:>12,}{totals.updates:>12,}{totals.merges:>8,}{duration(totals.elapsed_s):>10}"
    notes = {"control": merge.control and worker == 0, "stopped": not status.finished}
    return f"{worker:>6}{value:>10}{counts}  {', '.join(note for note, holds in notes.items() if holds)}".rstrip()


def _exchange(
    config: TrainConfig,
    run: Path,
    agent: TDMPC2,
    start: int,
    announce: Announce,
    should_stop: Callable[[], bool],
) -> Exchange:
    merge, fingerprint = config.merge, _fingerprint(config, agent, start)
    if merge.exchange == "distributed":
        return TorchDistributed(
            merge.worker,
            merge.members,
            fingerprint | {"every": merge.every},
            device=agent.device,
            timeout_s=merge.timeout,
            announce=announce,
        )
    return Filesystem(
        run.parent / "exchange",
        merge.worker,
        merge.members,
        fingerprint,
        every=merge.every,
        sync=merge.sync,
        timeout_s=merge.timeout,
        max_age=_max_age(config),
        announce=announce,
        sleep=_unless(should_stop),
    )


def _fingerprint(config: TrainConfig, agent: TDMPC2, start: int) -> dict[str, Any]:
    """Return what has to be equal for a mean of states to make sense, and for a round to mean the same to all."""
    names = ("strategy", "workers", "control", "moments")
    group = {f"merge.{name}": getattr(config.merge, name) for name in names}
    if config.merge.share != "weights":  # which is what groups do that began before there was this key
        group["merge.share"] = config.merge.share
    return {"task": config.task, **asdict(agent.network), **group, "merge.start": start}


def _max_age(config: TrainConfig) -> int:
    merge = config.merge
    if merge.share == "experience":
        return config.steps  # there is nothing that ages
    return 2 * merge.every if merge.max_age is None else merge.max_age


def _experience(merge: Merge, exchange: Exchange, replay: ReplayBuffer) -> NoExperience:
    return NoExperience() if merge.share == "weights" else Experience(exchange, ReplayEpisodes(replay), merge.worker)


def _unless(should_stop: Callable[[], bool]) -> Callable[[float], None]:
    """Return a `sleep` that raises Abandoned instead where the run is to stop."""

    def sleep(seconds: float) -> None:
        if should_stop():
            raise Abandoned
        time.sleep(seconds)

    return sleep


def _strategy(merge: Merge, agent: TDMPC2) -> Strategy:
    trained = {f"model.{name}" for name, parameter in agent.model.named_parameters() if parameter.requires_grad}
    match merge.strategy:
        case "nesterov":
            return Nesterov(trained.__contains__, merge.lr, merge.momentum)
        case "elastic":
            return Elastic(merge.alpha)
        case "weighted":
            return Weighted(merge.temperature)
        case _:
            return Mean()
