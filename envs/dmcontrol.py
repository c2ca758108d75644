"""Tasks of the DMControl suite as published TD-MPC2 sees them."""

import os
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from envs.errors import TaskError

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

ACTION_REPEAT = 2
MAX_EPISODE_STEPS = 500

_NEEDS_OPENGL = ("quadruped", "escape")  # its terrain is uploaded to the GPU at each reset, rendered or not
_UNLIMITED = 1e10  # the bound that dm_control gives to an actuator without one (mjMAXVAL)
_MODEL_SEED = 0
_FRAME_SIZE = 384
_PLAIN = {"shadow": False, "reflection": False}  # without a GPU they take two thirds of the time of a frame
_CAMERAS = {"quadruped": 2}  # that which shows the robot; of the other domains it is the first


def make_suite_task(domain: str, task: str) -> "DMControl":
    """Load a task of the suite, without OpenGL unless `MUJOCO_GL` is set.

    Raises:
        TaskError: If the task needs OpenGL and there is none.
    """
    needs_opengl = (domain, task) == _NEEDS_OPENGL
    # dm_control reads it when it is imported, hence the import below.
    os.environ.setdefault("MUJOCO_GL", "egl" if needs_opengl else "disable")
    try:
        from dm_control import suite

        # The lqr tasks draw their model when they are loaded: every instance must get the same.
        env = suite.load(domain, task, task_kwargs={"random": _MODEL_SEED})
        if needs_opengl:
            env.reset()
    except Exception as error:
        if not needs_opengl:
            raise
        raise TaskError(
            f"task={domain}-{task} needs OpenGL even for states, and MUJOCO_GL={os.environ['MUJOCO_GL']} gives none: "
            "set it to egl, osmesa or glfw before start"
        ) from error
    return DMControl(env, camera=_CAMERAS.get(domain, 0))


class DMControl(gymnasium.Env):
    """A dm_control environment with two physics steps per agent step, of which it sums the rewards.

    An episode is `MAX_EPISODE_STEPS` agent steps and ends by truncation, unless the task itself ends it
    with discount 0, which is termination. Observations are flattened and concatenated in the order of the
    observation spec. An episode depends on nothing but its reset seed and its actions, bit for bit.

    Actions in [-1, 1] are scaled to the bounds of the action spec; those without bounds are passed on as they are.

    Args:
        env: The environment.
        camera: Number of the camera of its model that `render` looks through.
    """

    max_episode_steps = MAX_EPISODE_STEPS
    frames_per_step = ACTION_REPEAT

    def __init__(self, env: "Environment", camera: int = 0) -> None:
        self._env = env
        self._camera = camera
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 1 / (ACTION_REPEAT * env.control_timestep())}
        spec = env.observation_spec()
        self._keys = tuple(spec)
        observation_size = sum(int(np.prod(entry.shape)) for entry in spec.values())
        self._center, self._half_range = _scale(env.action_spec())
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observation_size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, self._center.shape, np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Start an episode; without a seed, the task's random state goes on from where it is."""
        if seed is not None:
            self._env.task.random.seed(np.random.SeedSequence(seed).generate_state(8))
        self._steps = 0
        return self._flat(self._env.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Apply an action `[A]` in [-1, 1] for `ACTION_REPEAT` physics steps, or until the episode ends.

        Raises:
            dm_control.rl.control.PhysicsError: If the simulation diverges.
        """
        control = self._center + self._half_range * action
        time_step = self._env.step(control)
        reward = time_step.reward
        for _ in range(ACTION_REPEAT - 1):
            if time_step.last():
                break
            time_step = self._env.step(control)
            reward += time_step.reward
        self._steps += 1
        terminated = time_step.last() and time_step.discount == 0.0
        truncated = not terminated and (time_step.last() or self._steps >= MAX_EPISODE_STEPS)
        return self._flat(time_step.observation), reward, terminated, truncated, {}

    def render(self) -> np.ndarray:
        """Draw the present state, `[384, 384, 3]` uint8; it takes an OpenGL, see `envs.rendering`."""
        return self._env.physics.render(_FRAME_SIZE, _FRAME_SIZE, camera_id=self._camera, render_flag_overrides=_PLAIN)

    def close(self) -> None:
        """Release the model and what draws it, which dm_control at the end of the process fails to do."""
        self._env.physics.free()

    def _flat(self, observation: dict[str, Any]) -> np.ndarray:
        return np.concatenate([np.ravel(observation[key]) for key in self._keys], dtype=np.float32)


def _scale(spec: Any) -> tuple[np.ndarray, np.ndarray]:
    unlimited = (spec.minimum <= -_UNLIMITED) | (spec.maximum >= _UNLIMITED)
    low = np.where(unlimited, -1.0, spec.minimum)
    high = np.where(unlimited, 1.0, spec.maximum)
    return (high + low) / 2, (high - low) / 2
