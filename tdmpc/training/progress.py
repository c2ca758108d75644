"""The one record of how far a run is."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """What a run spends its time on; at any moment exactly one of these."""

    SETUP = "setup"
    COMPILING = "compiling"
    SEEDING = "seeding"
    PRETRAINING = "pretraining"
    TRAINING = "training"
    EVALUATION = "evaluation"
    MERGING = "merging"
    SAVING = "saving"


@dataclass(frozen=True)
class Counts:
    """How often each thing has happened.

    Attributes:
        steps: training steps, summed over all environments.
        vector_steps: training steps of all environments together.
        episodes: training episodes that ended, by termination or truncation.
        failed_episodes: training episodes that were discarded, after a physics error or a value that is not finite.
        updates: updates, those of pretraining included.
        pretraining_updates: updates between the seeding phase and the first planned step.
        merges: rounds of merging that changed the weights.
        eval_rounds: evaluations.
        eval_episodes: episodes of all evaluations.
        eval_steps: steps of all evaluations.
    """

    steps: int = 0
    vector_steps: int = 0
    episodes: int = 0
    failed_episodes: int = 0
    updates: int = 0
    pretraining_updates: int = 0
    merges: int = 0
    eval_rounds: int = 0
    eval_episodes: int = 0
    eval_steps: int = 0

    def plus(self, **increments: int) -> "Counts":
        """Return the counts after these have been added."""
        return replace(self, **{name: getattr(self, name) + amount for name, amount in increments.items()})

    def minus(self, other: "Counts") -> "Counts":
        """Return what has been added since `other`."""
        return Counts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})


def sum_counts(workers: list[Counts]) -> Counts:
    """Return the counts of a group of workers: the sums of theirs."""
    total = Counts()
    for counts in workers:
        total = total.plus(**asdict(counts))
    return total


@dataclass(frozen=True)
class ProgressView:
    """How far a run was at one moment; nothing in it changes afterwards.

    Attributes:
        total: counts of the run, over all its resumes.
        since_start: counts since this process started.
        elapsed_s: seconds spent in each phase, over all resumes.
        elapsed_since_start_s: the same since this process started.
        steps_in: steps done in each phase since this process started.
    """

    total: Counts
    since_start: Counts
    elapsed_s: Mapping[Phase, float]
    elapsed_since_start_s: Mapping[Phase, float]
    steps_in: Mapping[Phase, int]

    @property
    def total_elapsed_s(self) -> float:
        """Seconds that the run has taken, over all resumes."""
        return sum(self.elapsed_s.values())

    def phases(self) -> dict[str, float]:
        """Return the seconds spent in each phase, over all resumes, as they are logged."""
        return {f"progress/{phase}_s": seconds for phase, seconds in self.elapsed_s.items()}

    def eta_s(self, steps: int) -> float | None:
        """Return the seconds until `steps` steps in all, at the pace since this process began to train.

        Evaluations, merging and saving count towards the pace, random steps and pretraining do not. None where the
        pace is not known yet.
        """
        trained = self.steps_in[Phase.TRAINING]
        if trained == 0:
            return None
        phases = (Phase.TRAINING, Phase.EVALUATION, Phase.MERGING, Phase.SAVING)
        spent = sum(self.elapsed_since_start_s[phase] for phase in phases)
        return max(steps - self.total.steps, 0) * spent / trained

    def rates(self, since: "ProgressView") -> dict[str, float]:
        """Return what was done per second since another moment of the same process, and over the whole run.

        Of what was not done there is no rate. Steady is training alone: no random steps, setup, compiling, pretraining,
        evaluation, merging or saving.
        """
        counts = self.total.minus(since.total)
        elapsed = self.total_elapsed_s - since.total_elapsed_s
        trained = self.steps_in[Phase.TRAINING] - since.steps_in[Phase.TRAINING]
        training = self.elapsed_s[Phase.TRAINING] - since.elapsed_s[Phase.TRAINING]
        rates = {
            "rate/steps_per_s": _per_second(counts.steps, elapsed),
            "rate/updates_per_s": _per_second(counts.updates, elapsed),
            "rate/steady_steps_per_s": _per_second(trained, training),
            "rate/run_steps_per_s": _per_second(self.total.steps, self.total_elapsed_s),
        }
        return {name: rate for name, rate in rates.items() if rate is not None}


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


@dataclass
class Progress:
    """Counters and elapsed time of a run. The trainer alone advances them; everyone else gets a `view()`.

    Args:
        clock: seconds, monotonic.
    """

    clock: Callable[[], float] = time.monotonic
    _total: Counts = field(default_factory=Counts, init=False)
    _at_start: Counts = field(default_factory=Counts, init=False)
    _elapsed: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0), init=False)
    _elapsed_at_start: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0), init=False)
    _steps_in: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0), init=False)
    _phase: Phase = field(default=Phase.SETUP, init=False)

    def __post_init__(self) -> None:
        self._entered = self.clock()

    @property
    def total(self) -> Counts:
        """Counts of the run, over all its resumes."""
        return self._total

    def advance(self, **increments: int) -> None:
        """Add to counters; steps count towards the phase under way."""
        self._total = self._total.plus(**increments)
        self._steps_in[self._phase] += increments.get("steps", 0)

    def enter(self, phase: Phase) -> None:
        """Begin a phase, which ends the one before."""
        now = self.clock()
        self._elapsed[self._phase] += now - self._entered
        self._phase, self._entered = phase, now

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Interrupt the phase under way by another."""
        interrupted = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(interrupted)

    def view(self) -> ProgressView:
        """Return how far the run is now."""
        self.enter(self._phase)
        since_start = {phase: self._elapsed[phase] - self._elapsed_at_start[phase] for phase in Phase}
        return ProgressView(
            total=self._total,
            since_start=self._total.minus(self._at_start),
            elapsed_s=dict(self._elapsed),
            elapsed_since_start_s=since_start,
            steps_in=dict(self._steps_in),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what continues this record in another process, in plain types."""
        view = self.view()
        return {
            "counts": asdict(view.total),
            "elapsed_s": {phase.value: seconds for phase, seconds in view.elapsed_s.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a record; seconds since the start of this process stay what they are."""
        since_start = self.view().elapsed_since_start_s
        self._total = self._at_start = Counts(**state["counts"])
        self._elapsed_at_start = {phase: state["elapsed_s"].get(phase.value, 0.0) for phase in Phase}
        self._elapsed = {phase: self._elapsed_at_start[phase] + since_start[phase] for phase in Phase}
