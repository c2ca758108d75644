"""Experience replay: one ring of rows per environment, sampled in slices of consecutive rows."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict


class EmptyReplayError(RuntimeError):
    """No episode in the buffer is as long as a slice."""


class ReplayBuffer:
    """Keep the newest rows of every environment and sample slices of them uniformly.

    An episode of L steps takes L+1 rows: row t holds the observation at t and the action, reward and
    termination of the transition that led there; in row 0 these are zero and never sampled. So a row is
    written once, whole, and an episode that still runs can be sampled. An episode ends by termination, by `end`
    or by the next `begin` of its environment.

    Environments are numbered 0..E-1 and move independently. The batch drawn depends only on the rows, the
    write positions and the random generator, not on the way they came about.

    The rows of an environment have positions: 0, 1, 2... in the order of writing, where `discard` hands those of
    the dropped rows out again. A row lies in its ring at its position modulo the ring's size.

    Episodes that were played elsewhere come whole, into rings of their own: the guest rings, which are numbered from
    E on. So they are in nobody's way, and are sampled, saved and overwritten like all others.

    Attributes:
        unsaved_from: positions in every ring, guests included, from which on rows may differ from those last saved.
            Whoever saves the rows moves it forward (one saver a buffer), `discard` moves it back.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        capacity: int,
        observation_size: int,
        action_size: int,
        horizon: int,
        rng: np.random.Generator,
        device: torch.device | str = "cpu",
        guest_rings: int = 0,
    ) -> None:
        """Reserve the memory, which the operating system hands out as rows are filled.

        Args:
            num_envs: E, the number of environments.
            capacity: rows of all rings together, of which each gets the same number.
            observation_size: numbers in an observation (O).
            action_size: numbers in an action (A).
            horizon: H, transitions in a slice, at least 1.
            rng: source of the sampled starts; drawn from by `sample` alone.
            device: where the rows are kept and batches appear.
            guest_rings: number of rings for episodes that were played elsewhere.

        Raises:
            ValueError: a ring would be shorter than one slice.
        """
        num_rings = num_envs + guest_rings
        self._num_envs, self._ring_size = num_envs, capacity // num_rings
        if self._ring_size < horizon + 1:
            raise ValueError(
                f"buffer_size={capacity} leaves {self._ring_size} rows to each of {num_rings} rings; "
                f"with horizon={horizon} it must be at least {num_rings * (horizon + 1)}"
            )
        self._horizon = horizon
        self._rng = rng
        num_rows = num_rings * self._ring_size
        # Row `ring * ring_size + position`: flat, because one index then addresses every ring.
        self._rows = TensorDict(
            {
                name: torch.empty(num_rows, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in _columns(observation_size, action_size).items()
            },
            batch_size=[num_rows],
        )
        self._timestep = np.empty(num_rows, dtype=np.int32)  # number of a row within its episode
        self._cursor = np.zeros(num_rings, dtype=np.int64)  # position that is written next
        self._filled = np.zeros(num_rings, dtype=np.int64)  # rows alive, which end just before the cursor
        self._running = np.zeros(num_rings, dtype=np.bool_)  # whether `add` may extend the newest episode
        self.unsaved_from = np.zeros(num_rings, dtype=np.int64)

    def __len__(self) -> int:
        """Return the rows held, over all rings: L+1 for an episode of L steps."""
        return int(self._filled.sum())

    @property
    def nbytes(self) -> int:
        """Memory of a full buffer in bytes, all of it reserved from the start."""
        return self._rows.bytes() + self._timestep.nbytes

    @property
    def row_bytes(self) -> int:
        """Memory of one row in bytes."""
        return self.nbytes // len(self._timestep)

    def begin(self, obs: NDArray[np.float32], mask: NDArray[np.bool_]) -> None:
        """Begin an episode in the masked environments.

        Args:
            obs: [E, O] first observations; rows outside the mask are ignored.
            mask: [E] environments that were reset.
        """
        envs = np.flatnonzero(mask)
        nothing = np.zeros(len(mask), dtype=np.float32)
        action = np.zeros((len(mask), self._rows["action"].shape[-1]), dtype=np.float32)
        self._append(envs, 0, obs=obs, action=action, reward=nothing, terminated=nothing)
        self._running[envs] = True

    def add(
        self,
        action: NDArray[np.floating],
        reward: NDArray[np.floating],
        next_obs: NDArray[np.float32],
        terminated: NDArray[np.bool_],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add the transition from the newest observation to `next_obs` in the masked environments.

        Everything is copied, so the caller may reuse its arrays.

        Args:
            action: [E, A] actions taken.
            reward: [E] rewards received.
            next_obs: [E, O] observations reached: the true last ones where the episode ended.
            terminated: [E] whether the task ended there; a time limit is no termination.
            mask: [E] environments that moved; all of them when None. Rows outside it are ignored.

        Raises:
            RuntimeError: a masked environment has no running episode, as none began or the last one
                ended or was discarded; nothing is written then.
        """
        envs = np.arange(self._num_envs) if mask is None else np.flatnonzero(mask)
        self._require_running(envs)
        timestep = self._timestep[self._newest(envs)] + 1
        self._append(envs, timestep, obs=next_obs, action=action, reward=reward, terminated=terminated)
        self._running[envs] = np.logical_not(terminated[envs])

    def end(self, mask: NDArray[np.bool_]) -> None:
        """Note that the episodes of the masked environments have ended, as by a time limit; harmless for others.

        Args:
            mask: [E] environments whose episode is over.
        """
        self._running[np.flatnonzero(mask)] = False

    def discard(self, mask: NDArray[np.bool_]) -> None:
        """Drop the running episode of the masked environments, as if it had never begun.

        Only the rows of older episodes that it overwrote do not come back.

        Args:
            mask: [E] environments whose episode is void, for instance because the physics diverged.

        Raises:
            RuntimeError: a masked environment has no running episode; nothing is dropped then.
        """
        envs = np.flatnonzero(mask)
        self._require_running(envs)
        # An episode longer than the ring has overwritten its own beginning.
        dropped = np.minimum(self._timestep[self._newest(envs)] + 1, self._filled[envs])
        self._cursor[envs] -= dropped
        self._filled[envs] -= dropped
        self._running[envs] = False
        self.unsaved_from = np.minimum(self.unsaved_from, self._cursor)

    def ended(self) -> NDArray[np.int64]:
        """Return the positions before which episodes have ended, [E]: of the first row of those that run."""
        envs = np.arange(self._num_envs)
        begun = self._cursor[envs] - 1 - self._timestep[self._newest(envs)]
        return np.where(self._running[envs], begun, self._cursor[envs])

    def finished(self, since: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the episodes that have ended, from their first row on, and of which all rows are held.

        Args:
            since: [E] positions; of each environment, episodes that begin there or later.

        Returns:
            [3, K]: their environments, the positions of their first rows, and their numbers of rows.
        """
        oldest, ended = np.maximum(since, self.held()[0][: self._num_envs]), self.ended()
        found = []
        for env in range(self._num_envs):
            positions = np.arange(oldest[env], ended[env])
            first = positions[self._timestep[self._at(np.full_like(positions, env), positions)] == 0]
            found.append(np.stack([np.full_like(first, env), first, np.diff(first, append=ended[env])]))
        return np.concatenate(found, axis=1)

    def add_guest(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Add a whole episode that was played elsewhere, to the guest ring that has got the fewest rows so far.

        The ring is then as if the episode had been played there: of a longer one it holds the end.

        Args:
            columns: obs [L+1, O], action [L+1, A], reward [L+1] and terminated [L+1], as `read` returns them.

        Raises:
            ValueError: there are no guest rings.
        """
        ring = self._num_envs + int(np.argmin(self._cursor[self._num_envs :]))
        rows = len(columns["obs"])
        timestep = np.arange(rows, dtype=np.int32)[-self._ring_size :]
        kept = {name: column[-self._ring_size :] for name, column in columns.items()}
        positions = self._cursor[ring] + timestep.astype(np.int64)
        self.write(np.full_like(positions, ring), positions, {**kept, "timestep": torch.from_numpy(timestep)})
        self._cursor[ring] += rows
        self._filled[ring] = min(self._filled[ring] + rows, self._ring_size)

    def sample(self, batch_size: int) -> TensorDict:
        """Sample slices of one episode each, with replacement, every valid start equally likely.

        Returns:
            On the buffer's device and without batch size, time first: obs [H+1, B, O], action [H, B, A],
            reward [H, B, 1] and terminated [H, B, 1], all float32; terminated is 0 or 1.

        Raises:
            EmptyReplayError: no episode held has H+1 rows.
        """
        horizon = self._horizon
        rows = self._after(self._draw_starts(batch_size), np.arange(horizon + 1)[:, None])
        index = self._to_device(rows.reshape(-1))
        arrived = index[batch_size:]  # a transition is kept where it led
        obs = self._rows["obs"].index_select(0, index)
        action, reward, terminated = (
            self._rows[name].index_select(0, arrived) for name in ("action", "reward", "terminated")
        )
        return TensorDict(
            {
                "obs": obs.view(horizon + 1, batch_size, -1),
                "action": action.view(horizon, batch_size, -1),
                "reward": reward.view(horizon, batch_size, 1),
                "terminated": terminated.view(horizon, batch_size, 1).float(),
            }
        )

    def held(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of the oldest row held and of the row written next, of every ring, guests included."""
        return self._cursor - self._filled, self._cursor.copy()

    def read(self, envs: NDArray[np.int64], positions: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Copy N rows to the CPU, as columns [N, ...]: the transition's and `timestep`, the row's in its episode.

        Args:
            envs: [N] their environments, or guest rings.
            positions: [N] their positions, which must be held.
        """
        rows = self._at(envs, positions)
        index = self._to_device(rows)
        columns = {name: column.index_select(0, index).cpu() for name, column in self._rows.to_dict().items()}
        return columns | {"timestep": torch.from_numpy(self._timestep[rows])}

    def write(self, envs: NDArray[np.int64], positions: NDArray[np.int64], columns: Mapping[str, torch.Tensor]) -> None:
        """Put back what `read` returned; which rows are held is up to `load_state_dict`."""
        rows = self._at(envs, positions)
        index = self._to_device(rows)
        for name, column in self._rows.to_dict().items():
            column.index_copy_(0, index, columns[name].to(column.device))
        self._timestep[rows] = columns["timestep"].numpy()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the rows, ready for JSON."""
        return {
            "cursor": self._cursor.tolist(),
            "filled": self._filled.tolist(),
            "running": self._running.tolist(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or in a buffer of another capacity; `write` the rows held then.

        Raises:
            ValueError: the state is of another number of rings; nothing is changed then.
        """
        if len(state["cursor"]) != len(self._cursor):
            guests = len(self._cursor) - self._num_envs
            here = f"num_envs={self._num_envs}" + (f" and {guests} rings for episodes of others" if guests else "")
            raise ValueError(f"{here}: the replay was saved with {len(state['cursor'])}")
        self._cursor[:] = state["cursor"]
        self._filled[:] = np.minimum(state["filled"], self._ring_size)  # the newest that fit
        self._running[:] = state["running"]
        self._rng.bit_generator.state = state["rng"]
        self.unsaved_from[:] = 0

    def _draw_starts(self, batch_size: int) -> NDArray[np.int64]:
        # Candidates are uniform, so those that pass the test are uniform over the valid starts; and whether
        # enough passed says nothing about which, so starting over or enumerating keeps that exact.
        # Enumerating takes over where it is the cheaper way: few rows, or few of them valid.
        num_candidates = int(self._candidates_per_ring().sum())
        draws = batch_size + batch_size // 4
        while draws < num_candidates:
            starts = self._valid_starts(self._rng.integers(num_candidates, size=draws))
            if len(starts) >= batch_size:
                return starts[:batch_size]
            draws *= 8
        starts = self._valid_starts(np.arange(num_candidates))
        if len(starts) == 0:
            raise EmptyReplayError(
                f"horizon={self._horizon} needs episodes of at least {self._horizon} steps; "
                f"none of the {len(self)} rows in the buffer starts such a slice"
            )
        return starts[self._rng.integers(len(starts), size=batch_size)]

    def _valid_starts(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        # In the order of writing, a row's timestep is its predecessor's plus one, or 0 where an episode begins
        # (after `discard`, one must). So a row with timestep H or more has H rows of its own episode before it.
        starts = self._locate(candidates)
        ends = self._after(starts, self._horizon)
        return starts[self._timestep[ends] >= self._horizon]

    def _candidates_per_ring(self) -> NDArray[np.int64]:
        # A slice that crosses the write position is excluded here, one that crosses episodes later.
        return np.maximum(self._filled - self._horizon, 0)

    def _locate(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        # Candidates are numbered ring by ring, and there from the oldest row to the newest.
        per_ring = self._candidates_per_ring()
        until = np.cumsum(per_ring)
        rings = np.searchsorted(until, candidates, side="right")
        age_order = candidates - (until - per_ring)[rings]
        oldest = (self._cursor - self._filled)[rings]
        return self._at(rings, oldest + age_order)

    def _after(self, rows: NDArray[np.int64], offset: int | NDArray[np.int64]) -> NDArray[np.int64]:
        position = rows % self._ring_size
        return rows - position + (position + offset) % self._ring_size

    def _newest(self, envs: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._at(envs, self._cursor[envs] - 1)

    def _at(self, envs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return envs * self._ring_size + positions % self._ring_size

    def _append(self, envs: NDArray[np.int64], timestep: int | NDArray[np.int32], **columns: NDArray) -> None:
        rows = self._at(envs, self._cursor[envs])
        self._timestep[rows] = timestep
        index = self._to_device(rows)
        for name, values in columns.items():
            column = self._rows[name]
            column.index_copy_(0, index, self._to_device(values[envs], column.dtype))
        self._cursor[envs] += 1
        self._filled[envs] = np.minimum(self._filled[envs] + 1, self._ring_size)

    def _to_device(self, array: NDArray, dtype: torch.dtype | None = None) -> torch.Tensor:
        # Not blocking, or the copy would wait for the updates queued before it. The array may go at once:
        # CUDA stages unpinned memory before it returns.
        return torch.from_numpy(array).to(self._rows["obs"].device, dtype, non_blocking=True)

    def _require_running(self, envs: NDArray[np.int64]) -> None:
        if not self._running[envs].all():
            idle = envs[~self._running[envs]].tolist()
            raise RuntimeError(f"no episode runs in environments {idle}: call begin() first")


def bytes_needed(*, num_envs: int, capacity: int, observation_size: int, action_size: int, guest_rings: int = 0) -> int:
    """Return `nbytes` of a `ReplayBuffer` of this size without making one."""
    columns = _columns(observation_size, action_size).values()
    row = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns) + np.dtype(np.int32).itemsize
    num_rings = num_envs + guest_rings
    return capacity // num_rings * num_rings * row


def _columns(observation_size: int, action_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "obs": ((observation_size,), torch.float32),
        "action": ((action_size,), torch.float32),
        "reward": ((), torch.float32),
        "terminated": ((), torch.bool),
    }
