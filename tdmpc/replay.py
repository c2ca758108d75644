"""Experience replay: one ring of rows per environment, sampled in slices of consecutive rows."""

import math

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
    written once, whole, and an episode that still runs can be sampled. An episode ends by termination or,
    without a call of its own, by the next `begin` of its environment.

    Environments are numbered 0..E-1 and move independently. The batch drawn depends only on the rows, the
    write positions and the random generator, not on the way they came about.
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
    ) -> None:
        """Reserve the memory, which the operating system hands out as rows are filled.

        Args:
            num_envs: E, the number of environments.
            capacity: rows of all environments together; each gets `capacity // num_envs` of them.
            observation_size: numbers in an observation (O).
            action_size: numbers in an action (A).
            horizon: H, transitions in a slice, at least 1.
            rng: source of the sampled starts; drawn from by `sample` alone.
            device: where the rows are kept and batches appear.

        Raises:
            ValueError: a ring would be shorter than one slice.
        """
        self._ring_size = capacity // num_envs
        if self._ring_size < horizon + 1:
            raise ValueError(
                f"buffer_size={capacity} leaves {self._ring_size} rows to each of {num_envs} environments; "
                f"with horizon={horizon} it must be at least {num_envs * (horizon + 1)}"
            )
        self._horizon = horizon
        self._rng = rng
        num_rows = num_envs * self._ring_size
        # Row `env * ring_size + position`: flat, because one index then addresses every environment.
        self._rows = TensorDict(
            {
                name: torch.empty(num_rows, *shape, dtype=dtype, device=device)
                for name, (shape, dtype) in _columns(observation_size, action_size).items()
            },
            batch_size=[num_rows],
        )
        self._timestep = np.empty(num_rows, dtype=np.int32)  # position of a row within its episode
        self._cursor = np.zeros(num_envs, dtype=np.int64)  # position in the ring that is written next
        self._filled = np.zeros(num_envs, dtype=np.int64)  # rows alive, which end just before the cursor
        self._running = np.zeros(num_envs, dtype=np.bool_)  # whether `add` may extend the newest episode

    def __len__(self) -> int:
        """Return the rows held, over all environments: L+1 for an episode of L steps."""
        return int(self._filled.sum())

    @property
    def nbytes(self) -> int:
        """Memory of a full buffer in bytes, all of it reserved from the start."""
        return self._rows.bytes() + self._timestep.nbytes

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
                terminated or was discarded; nothing is written then.
        """
        envs = np.arange(len(self._cursor)) if mask is None else np.flatnonzero(mask)
        self._require_running(envs)
        timestep = self._timestep[self._newest(envs)] + 1
        self._append(envs, timestep, obs=next_obs, action=action, reward=reward, terminated=terminated)
        self._running[envs] = np.logical_not(terminated[envs])

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
        self._cursor[envs] = (self._cursor[envs] - dropped) % self._ring_size
        self._filled[envs] -= dropped
        self._running[envs] = False

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

    def _draw_starts(self, batch_size: int) -> NDArray[np.int64]:
        # Candidates are uniform, so those that pass the test are uniform over the valid starts; and whether
        # enough passed says nothing about which, so starting over or enumerating keeps that exact.
        # Enumerating takes over where it is the cheaper way: few rows, or few of them valid.
        num_candidates = int(self._candidates_per_env().sum())
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

    def _candidates_per_env(self) -> NDArray[np.int64]:
        # A slice that crosses the write position is excluded here, one that crosses episodes later.
        return np.maximum(self._filled - self._horizon, 0)

    def _locate(self, candidates: NDArray[np.int64]) -> NDArray[np.int64]:
        # Candidates are numbered environment by environment, and there from the oldest row to the newest.
        per_env = self._candidates_per_env()
        until = np.cumsum(per_env)
        envs = np.searchsorted(until, candidates, side="right")
        age_order = candidates - (until - per_env)[envs]
        oldest = (self._cursor - self._filled)[envs]
        return envs * self._ring_size + (oldest + age_order) % self._ring_size

    def _after(self, rows: NDArray[np.int64], offset: int | NDArray[np.int64]) -> NDArray[np.int64]:
        position = rows % self._ring_size
        return rows - position + (position + offset) % self._ring_size

    def _newest(self, envs: NDArray[np.int64]) -> NDArray[np.int64]:
        return envs * self._ring_size + (self._cursor[envs] - 1) % self._ring_size

    def _append(self, envs: NDArray[np.int64], timestep: int | NDArray[np.int32], **columns: NDArray) -> None:
        cursor = self._cursor[envs]
        rows = envs * self._ring_size + cursor
        self._timestep[rows] = timestep
        index = self._to_device(rows)
        for name, values in columns.items():
            column = self._rows[name]
            column.index_copy_(0, index, self._to_device(values[envs], column.dtype))
        self._cursor[envs] = (cursor + 1) % self._ring_size
        self._filled[envs] = np.minimum(self._filled[envs] + 1, self._ring_size)

    def _to_device(self, array: NDArray, dtype: torch.dtype | None = None) -> torch.Tensor:
        # Not blocking, or the copy would wait for the updates queued before it. The array may go at once:
        # CUDA stages unpinned memory before it returns.
        return torch.from_numpy(array).to(self._rows["obs"].device, dtype, non_blocking=True)

    def _require_running(self, envs: NDArray[np.int64]) -> None:
        if not self._running[envs].all():
            idle = envs[~self._running[envs]].tolist()
            raise RuntimeError(f"no episode runs in environments {idle}: call begin() first")


def bytes_needed(*, num_envs: int, capacity: int, observation_size: int, action_size: int) -> int:
    """Return `nbytes` of a `ReplayBuffer` of this size without making one."""
    columns = _columns(observation_size, action_size).values()
    row = sum(math.prod(shape) * dtype.itemsize for shape, dtype in columns) + np.dtype(np.int32).itemsize
    return capacity // num_envs * num_envs * row


def _columns(observation_size: int, action_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "obs": ((observation_size,), torch.float32),
        "action": ((action_size,), torch.float32),
        "reward": ((), torch.float32),
        "terminated": ((), torch.bool),
    }
