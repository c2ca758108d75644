"""The returns whose times are compared: shares of the best that is known of a task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tdmpc.benchmarks.curves import Track

PERCENTS = (50, 80, 95)

PUBLISHED_BEST: Mapping[str, float] = {
    "cartpole-balance": 998,
    "cartpole-swingup": 876,
    "cheetah-run": 844,
    "cup-catch": 986,
    "finger-spin": 986,
    "humanoid-walk": 628,
    "pendulum-swingup": 842,
    "reacher-easy": 983,
    "walker-stand": 991,
    "walker-walk": 980,
}
"""Highest mean return of the published TD-MPC2 at 100k, 200k, 500k or 1M frames, over 3 seeds, 1M frames being 500 000
steps. Returns of DMControl are between 0 and 1000."""

SOURCE = "best published mean return of TD-MPC2 within 1M frames, 3 seeds"


@dataclass(frozen=True)
class Goals:
    """Returns to reach, measured from a floor.

    Attributes:
        best: 100 %.
        floor: 0 %.
        source: where `best` is from, in words.
    """

    best: float
    floor: float
    source: str

    def threshold(self, percent: float) -> float:
        """Return the return that is so many percent of the way from floor to best."""
        return self.floor + (self.best - self.floor) * percent / 100

    def time_to(self, percent: float, track: Track) -> float | None:
        """Return the charged seconds after which a curve is there for the first time; None if it never is."""
        return track.time_to(self.threshold(percent)) if self.best > self.floor else None

    def __str__(self) -> str:
        floor = "" if self.floor == 0 else f", counted from {self.floor:.4g}, the mean of untrained agents"
        return f"{self.best:.4g} ({self.source}){floor}"


def goals_of(task: str, best: float | None, tracks: Sequence[Track]) -> Goals | None:
    """Return the goals of a task; None where nothing is known of it and nothing was run.

    Where returns are published, they start at 0. Of other tasks that is not known, and the floor is what agents reach
    before they learn.

    Args:
        task: its name.
        best: as the user has set it.
        tracks: curves of all runs.
    """
    floor = 0.0
    if task not in PUBLISHED_BEST:
        if not tracks:
            return None
        floor = sum(float(track.returns[0]) for track in tracks) / len(tracks)
    if best is not None:
        return Goals(best, floor, "as set by best=")
    if task in PUBLISHED_BEST:
        return Goals(PUBLISHED_BEST[task], floor, SOURCE)
    return Goals(max(float(track.returns.max()) for track in tracks), floor, "the best seen here")
