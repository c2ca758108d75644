"""Several environments of one task, stepped together, each ending its episodes on its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from gymnasium.spaces import flatdim

from envs.children import Children
from envs.choice import choose_mode
from envs.errors import EnvironmentCrash, RenderError
from envs.in_process import InProcess
from envs.rendering import set_up_opengl, try_to_draw
from envs.slot import IDLE, Slot
from envs.tasks import make_env

_CLOSE_PATIENCE_S = 5.0
_DEFAULT_RENDER_FPS = 30.0


class StepResult(NamedTuple):
    """What one step of every environment gave; the arrays are the caller's own."""

    obs: np.ndarray
    """Observations after the step `[E, O]` float32; of an episode that ended, its true last one."""
    reward: np.ndarray
    """Rewards `[E]` float32."""
    terminated: np.ndarray
    """Whether the episode ended in this step in a state without a future `[E]` bool."""
    truncated: np.ndarray
    """Whether the episode was cut off in this step `[E]` bool."""
    failed: np.ndarray
    """Whether it was cut off because the simulation failed `[E]` bool; such a row repeats the last valid
    observation, with reward 0 and `truncated`, and is no transition to learn from."""


class Backend(Protocol):
    """Where the environments run."""

    def reset(self, mask: np.ndarray, seeds: list[int | None]) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes where `mask` `[E]` is set; return observations `[E, O]` and info."""
        ...

    def send(self, action: np.ndarray) -> None:
        """Hand over the actions `[E, A]` of a step."""
        ...

    def receive(self) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Finish the step; return observations `[E, O]`, rewards `[E]` and info."""
        ...

    def check_alive(self) -> None:
        """Raise `EnvironmentCrash` if an environment has died."""
        ...

    def close(self, patience_s: float) -> None:
        """Close the environments."""
        ...


def make_vector(
    task: str,
    num_envs: int,
    vector: str = "auto",
    options: Mapping[str, Any] | None = None,
    render: bool = False,
) -> "VectorEnv":
    """Make `num_envs` environments of a task.

    Args:
        task: Name of the task, see `envs.tasks`.
        num_envs: How many, E.
        vector: `sync` runs them one after the other in this process, `async` each in its own; `auto` takes what
            is faster here (`choose_mode`). Results are the same, bit for bit.
        options: What `gymnasium.make` gets, for a `gym:` task.
        render: Whether frames will be asked for. The environments are then in this process, and one frame is drawn
            on trial. The first environments that a process makes must be these: OpenGL is chosen once.

    Raises:
        TaskError: If the task cannot be used.
        RenderError: If no frames can be drawn; without `render` the environments may well be made.
        EnvironmentCrash: If a process could not be started.
    """
    missing_opengl = set_up_opengl() if render else None
    make = partial(make_env, task, dict(options or {}))
    env = make()
    observation_size, action_size = flatdim(env.observation_space), flatdim(env.action_space)
    max_episode_steps = env.get_wrapper_attr("max_episode_steps")
    frames_per_step = env.get_wrapper_attr("frames_per_step")
    env.close()
    if render:
        make = partial(make, render=True)
        try_to_draw(make, missing_opengl)
        vector = "sync"
    render_fps = float(env.metadata.get("render_fps") or _DEFAULT_RENDER_FPS)
    make_slot = partial(Slot, make, observation_size, action_size)
    mode = choose_mode(make_slot, num_envs) if vector == "auto" else vector
    backend = {"sync": InProcess, "async": Children}[mode]([make_slot] * num_envs)
    return VectorEnv(
        backend, mode, num_envs, observation_size, action_size, max_episode_steps, render_fps, frames_per_step
    )


class VectorEnv:
    """E environments with observations `[O]` and actions `[A]` in [-1, 1].

    An episode starts by `reset` only, and an environment whose episode has ended must be reset or left out of the
    next step (`active`). After an `EnvironmentCrash` the vector is closed, and none of its processes is left.
    """

    def __init__(
        self,
        backend: Backend,
        mode: str,
        num_envs: int,
        observation_size: int,
        action_size: int,
        max_episode_steps: int,
        render_fps: float = _DEFAULT_RENDER_FPS,
        frames_per_step: int = 1,
    ) -> None:
        self.mode = mode
        self.num_envs = num_envs
        self.observation_size = observation_size
        self.action_size = action_size
        self.max_episode_steps = max_episode_steps
        self.render_fps = render_fps  # the frames a second, one a step, that show the task at its own speed
        self.frames_per_step = frames_per_step  # simulator frames, of which published curves are functions
        self._backend: Backend | None = backend
        self._stepping = False
        self._started = False
        self._running = np.zeros(num_envs, np.bool_)

    def reset(self, mask: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
        """Start a new episode in some environments, the first time in all.

        Args:
            mask: Which ones `[E]` bool.
            seeds: Their seeds, length E; an episode depends on nothing but its seed and its actions. Entries
                outside of the mask are ignored.

        Returns:
            The latest observation of every environment `[E, O]` float32.

        Raises:
            ValueError: If the mask is empty, or leaves out an environment that never had an episode.
            EnvironmentCrash: If an environment raises or dies.
        """
        self._require(stepping=False)
        if not (self._started or mask.all()):
            raise ValueError("the first reset must start an episode in every environment")
        chosen = [int(seed) if starts else None for seed, starts in zip(seeds, mask, strict=True)]
        obs, _ = self._supervised(lambda backend: backend.reset(mask, chosen))
        self._started = True
        self._running |= mask
        return obs

    def step(self, action: np.ndarray, active: np.ndarray | None = None) -> StepResult:
        """Take a step and wait for it: `step_async`, then `step_wait`."""
        self.step_async(action, active)
        return self.step_wait()

    def step_async(self, action: np.ndarray, active: np.ndarray | None = None) -> None:
        """Begin a step; with `async` environments it goes on while the caller does other things.

        Args:
            action: `[E, A]` float32 in [-1, 1]; the caller may reuse the array at once.
            active: Which environments take it `[E]` bool, by default all. The others stay as they are: their row
                of the result is their latest observation, reward 0 and no flag.

        Raises:
            ValueError: If an active environment has no running episode, or its action is not finite.
            EnvironmentCrash: If an environment has died.
        """
        self._require(stepping=False)
        active = np.ones(self.num_envs, np.bool_) if active is None else active
        _refuse(active & ~self._running, "have no running episode: reset them or leave them out of `active`")
        _refuse(active & ~np.isfinite(action).all(axis=1), "got an action that is not finite")
        sent = np.where(active[:, None], action, IDLE).astype(np.float32)
        self._supervised(lambda backend: backend.send(sent))
        self._stepping = True

    def step_wait(self) -> StepResult:
        """Finish the step that `step_async` began.

        Raises:
            EnvironmentCrash: If an environment raises or dies.
        """
        self._require(stepping=True)
        self._stepping = False
        obs, reward, info = self._supervised(lambda backend: backend.receive())
        terminated, truncated, failed = (
            info.get(name, np.zeros(self.num_envs, np.bool_)) for name in ("terminated", "truncated", "failed")
        )
        self._running &= ~(terminated | truncated)
        return StepResult(obs, reward.astype(np.float32), terminated, truncated, failed)

    def check_alive(self) -> None:
        """Notice the death of an environment's process while no step is under way; costs microseconds.

        Raises:
            EnvironmentCrash: If one has died.
        """
        self._supervised(lambda backend: backend.check_alive())

    def render(self, env: int) -> np.ndarray:
        """Return a picture of an environment as it is, `[H, W, 3]` uint8; nothing else notices.

        Raises:
            RenderError: If it cannot be drawn, be it that the vector was not made with `render`.
        """
        self._require(stepping=False)
        if not isinstance(self._backend, InProcess):
            raise RenderError("environments in other processes are not drawn")
        return self._backend.render(env)

    def close(self) -> None:
        """Close the environments and end their processes; a second call does nothing."""
        self._close(_CLOSE_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self, patience_s: float) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close(patience_s)

    def _supervised(self, call: Callable[[Backend], Any]) -> Any:
        assert self._backend is not None
        try:
            result = call(self._backend)
            if result is not None:
                _raise_crash(result)
        except EnvironmentCrash:
            self._close(patience_s=0.0)
            raise
        return result

    def _require(self, *, stepping: bool) -> None:
        if self._backend is None:
            raise RuntimeError("the environments are closed")
        if self._stepping != stepping:
            raise RuntimeError("there is no step to wait for" if stepping else "the last step was not waited for")


def _raise_crash(result: tuple | None) -> None:
    crashes = result[-1].get("crash") if result else None
    if crashes is not None:
        number = next(i for i, crash in enumerate(crashes) if crash is not None)
        raise EnvironmentCrash(f"environment {number} crashed:\n{crashes[number]}")


def _refuse(wrong: np.ndarray, reason: str) -> None:
    if wrong.any():
        raise ValueError(f"environments {np.flatnonzero(wrong).tolist()} {reason}")
