"""What a fixed set of runs came to, stored for later ones to be compared with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tdmpc.benchmarks.compare import MACHINE_KEYS
from tdmpc.benchmarks.curves import Row
from tdmpc.benchmarks.goals import PUBLISHED_BEST
from tdmpc.benchmarks.outcomes import steps_per_s
from tdmpc.benchmarks.tables import Table
from tdmpc.keys import ConfigError, shown

FORMAT = 1
WORSE = "WORSE"


@dataclass(frozen=True)
class Measured:
    """What a run of a task came to.

    Attributes:
        curve: step and return of every evaluation.
        speeds: how much was done in a second, by what it is.
    """

    curve: list[tuple[int, float]]
    speeds: Mapping[str, float]


@dataclass(frozen=True)
class Reference:
    """Measurements that others are compared with.

    Attributes:
        machine: what they were made on.
        settings: keys of train.py.
        tasks: what was measured, by task.
    """

    machine: Mapping[str, Any]
    settings: Sequence[str]
    tasks: Mapping[str, Measured]

    def write(self, path: Path) -> None:
        """Write JSON, in place of an earlier reference."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        path.write_text(f"{content}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """Read what `write` wrote.

        Raises:
            ConfigError: there is no such file, or it is something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            tasks = {name: Measured(**task) for name, task in content["tasks"].items()}
            known = content["format"] == FORMAT
            reference = cls(content["machine"], content["settings"], tasks)
        except FileNotFoundError:
            raise ConfigError(
                f"reference={path}: there is none yet; make one with suite=regress update_reference=true"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            known, reference = False, None
        if not known or reference is None:
            raise ConfigError(f"reference={path}: must be a JSON file that suite=regress wrote in format {FORMAT}")
        return reference


def measure(rows: Sequence[Row]) -> Measured:
    """Return curve and speeds of a run from its rows."""
    evaluations = [row for row in rows if row["kind"] == "eval"]
    pretrain = next(row for row in rows if row["kind"] == "pretrain")
    eval_steps = sum(row["eval/episode_length"] * row["eval/episodes"] for row in evaluations)
    return Measured(
        curve=[(row["step"], row["eval/episode_reward"]) for row in evaluations if "eval/episode_reward" in row],
        speeds={
            "training steps/s": steps_per_s(rows) or 0.0,
            "pretraining updates/s": pretrain["progress/pretraining_updates"] / pretrain["progress/pretraining_s"],
            "evaluation steps/s": eval_steps / sum(row["eval/duration_s"] for row in evaluations),
        },
    )


def print_comparison(reference: Reference, now: Reference, *, slower: float, band: float) -> bool:
    """Print measurements beside the reference, and tell whether none is worse.

    Args:
        reference: of before.
        now: of the same tasks.
        slower: ratio from which a speed counts as worse.
        band: share of the best return by which an evaluation may fall short.
    """
    for line in _differences(reference, now):
        print(line)
    lines = [line for task in now.tasks for line in _lines(task, reference, now, slower, band)]
    print(Table(["task", "what", "reference", "now", ""], lines).markdown())
    worse = [f"{task} {what}" for task, what, _, _, verdict in lines if verdict == WORSE]
    print(f"worse: {', '.join(worse)}" if worse else "nothing is worse")
    return not worse


def _lines(task: str, reference: Reference, now: Reference, slower: float, band: float) -> Iterator[list[str]]:
    if task not in reference.tasks:
        yield [task, "all", "-", "-", "not in the reference"]
        return
    before, measured = reference.tasks[task], now.tasks[task]
    for name in {**before.speeds, **measured.speeds}:
        was, speed = before.speeds.get(name), measured.speeds.get(name)
        yield [task, name, _number(was), _number(speed), _verdict_on_speed(was, speed, slower)]
    earlier, present, margin = dict(before.curve), dict(measured.curve), band * PUBLISHED_BEST.get(task, 1000)
    for step in sorted({**earlier, **present}):
        was, value = earlier.get(step), present.get(step)
        yield [task, f"return at step {step}", _number(was), _number(value), _verdict_on_return(was, value, margin)]


def _verdict_on_speed(was: float | None, now: float | None, slower: float) -> str:
    if was is None or now is None:
        return _verdict_on_absence(was)
    return WORSE if now * slower <= was else "faster" if now >= was * slower else "alike"


def _verdict_on_return(was: float | None, now: float | None, margin: float) -> str:
    if was is None or now is None:
        return _verdict_on_absence(was)
    if was == now:
        return "the same"
    return WORSE if now < was - margin else "within the band" if now <= was + margin else "better"


def _verdict_on_absence(was: float | None) -> str:
    return "not in the reference" if was is None else WORSE


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _differences(reference: Reference, now: Reference) -> Iterator[str]:
    pairs = {name: (reference.machine.get(name), now.machine.get(name)) for name in MACHINE_KEYS}
    different = [f"{name} {shown(is_now)} (was {shown(was)})" for name, (was, is_now) in pairs.items() if was != is_now]
    different += ["other settings"] if list(reference.settings) != list(now.settings) else []
    if different:
        yield f"not measured alike: {'; '.join(different)}"
