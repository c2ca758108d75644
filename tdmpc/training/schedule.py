"""Saveable objects that decide when something is due."""

from fractions import Fraction


class Every:
    """Tell when a counter has reached the next multiple of an interval, each multiple at most once.

    A counter that jumps (several environments step together) is due when it has reached or passed a multiple;
    jumping over several of them at once is due once.

    Args:
        interval: distance between due points, at least 1.
        start: the first due point.
    """

    def __init__(self, interval: int, start: int) -> None:
        self.interval, self.start = interval, start
        self.last: int | None = None  # the count at which it was last due

    def __call__(self, count: int) -> bool:
        """Tell whether `count` has reached the next point; if so, move on to the one after it."""
        due = self.due(count)
        if due:
            self.last = count
        return due

    def due(self, count: int) -> bool:
        """Tell whether `count` has reached the next point, and leave it at that."""
        return count >= self.next

    @property
    def next(self) -> int:
        """The next due point."""
        return self.start if self.last is None else (self.last // self.interval + 1) * self.interval

    def state_dict(self) -> dict[str, int | None]:
        """Return what `load_state_dict` needs to continue, also with another interval."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Continue from a state."""
        self.last = state["last"]


class Ratio:
    """Tell how many updates are due after so many steps, carrying fractions: never more, never fewer.

    Args:
        steps_per_update: steps per update; below 1 there are several updates per step.
    """

    def __init__(self, steps_per_update: float) -> None:
        # A fraction of the decimal number as written: in floating point 3 / 0.1 falls short of 30.
        self.steps_per_update = Fraction(str(steps_per_update))
        self.done = 0

    def __call__(self, steps: int) -> int:
        """Return the number of updates that `steps` steps in all allow and earlier calls have not yet returned."""
        due = int(steps / self.steps_per_update) - self.done
        self.done += due
        return due

    def state_dict(self) -> dict[str, int]:
        """Return what `load_state_dict` needs to continue."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a state."""
        self.done = state["done"]
