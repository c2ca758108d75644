"""Whole episodes out of a replay, and into it: what workers share of their experience."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdmpc.replay import ReplayBuffer
from tdmpc.replay_segments import Spans

INDEX = ("env", "first", "rows")


class ReplayEpisodes:
    """Give episodes of a replay away, each once, and take those of others in, each once.

    Episodes travel as a flat state of tensors. K episodes of N rows together are::

        env, first, rows [K]             int64: environment, position of the first row, number of rows (L+1)
        obs [N, O], action [N, A]        columns of `ReplayBuffer.read`, one episode after the other
        reward [N], terminated [N]

    Environment and position tell which episode of a worker it is: one that was killed, goes back to its checkpoint and
    plays an episode again gives it the same ones.

    Args:
        replay: with guest rings, where others give something.
    """

    def __init__(self, replay: ReplayBuffer) -> None:
        self.replay = replay
        self._given = np.zeros_like(replay.ended())  # [E] positions before which episodes have been given
        self._taken: dict[int, dict[int, int]] = {}  # the same of others, by worker and environment
        nothing = np.empty(0, dtype=np.int64)
        self._kinds = _kinds(self._read(nothing, nothing) | dict.fromkeys(INDEX, torch.from_numpy(nothing)))

    def finished(self) -> dict[str, Tensor]:
        """Return the episodes that have ended since those that were `given`, on the CPU.

        An episode that the replay no longer holds from its first row on is left out, so there are never more rows than
        the replay holds.
        """
        index = self.replay.finished(self._given)
        env, first, rows = index
        episode, positions = Spans(first, first + rows).rows()
        # By way of lists: a row of an empty array has strides that cannot be written to a file.
        numbers = {name: torch.tensor(row.tolist(), dtype=torch.int64) for name, row in zip(INDEX, index, strict=True)}
        return self._read(env[episode], positions) | numbers

    def given(self) -> None:
        """Take note that the others have got what `finished` returns."""
        self._given = self.replay.ended()

    def problem(self, episodes: Mapping[str, Tensor]) -> str | None:
        """Return why this replay cannot take in what another worker gives, with its message as the subject."""
        kinds = _kinds(episodes)
        for name in sorted(kinds.keys() | self._kinds.keys()):
            found, wanted = kinds.get(name, "missing"), self._kinds.get(name, "missing")
            if found != wanted:
                return f"has other episodes: {name} is {found}, not {wanted}"
        if not _consistent(episodes):
            return "has other episodes: their rows do not add up"
        return None

    def take(self, worker: int, episodes: Mapping[str, Tensor]) -> int:
        """Add those of a worker's episodes that were not taken before, and return how many.

        Args:
            worker: who has played them.
            episodes: without a `problem`.
        """
        taken, count = self._taken.setdefault(worker, {}), 0
        columns = {name: column for name, column in episodes.items() if name not in INDEX}
        begin = 0
        for env, first, rows in zip(*(episodes[name].tolist() for name in INDEX), strict=True):
            if first >= taken.get(env, 0):
                self.replay.add_guest({name: column[begin : begin + rows] for name, column in columns.items()})
                taken[env] = first + rows
                count += 1
            begin += rows
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return what has been given and taken, in plain types; the rows are the replay's."""
        taken = {worker: dict(positions) for worker, positions in self._taken.items()}
        return {"given": self._given.tolist(), "taken": taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._given = np.array(state["given"], dtype=np.int64)
        self._taken = {worker: dict(positions) for worker, positions in state["taken"].items()}

    def _read(self, envs: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        columns = self.replay.read(envs, positions)
        del columns["timestep"]  # which episodes and their rows tell as well
        return columns


def _kinds(episodes: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe the tensors of episodes, whatever their number."""
    described = {}
    for name, tensor in episodes.items():
        shape = ", ".join(["*", *map(str, tensor.shape[1:])]) if tensor.ndim else ""
        described[name] = f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]"
    return described


def _consistent(episodes: Mapping[str, Tensor]) -> bool:
    """Tell whether rows are those of the episodes listed, of which none goes on after it has terminated."""
    rows, num_rows = episodes["rows"], len(episodes["obs"])
    lengths = {name: len(tensor) for name, tensor in episodes.items()}
    if any(length != (len(rows) if name in INDEX else num_rows) for name, length in lengths.items()):
        return False
    if bool(((rows < 1) | (rows > num_rows)).any()) or int(rows.sum()) != num_rows:
        return False
    going_on = torch.ones(num_rows, dtype=torch.bool)
    going_on[rows.cumsum(0) - 1] = False
    return not bool((episodes["terminated"] & going_on).any())
