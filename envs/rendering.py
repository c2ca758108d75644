"""Frames of environments, and the OpenGL that draws those of MuJoCo.

DMControl chooses its OpenGL from `MUJOCO_GL` when it is imported, once a process. Hence whoever wants frames must say
so (`make_vector(..., render=True)`) before any other environment is made.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import cache

import gymnasium
import numpy as np

from envs.dmcontrol import DMControl
from envs.errors import RenderError

HINT = "apt-get install libosmesa6, or MUJOCO_GL=egl with the driver of a GPU"

_RENDERERS = ("egl", "osmesa", "glfw")
_DISABLED = "disable"
_PROBE_PATIENCE_S = 60.0
_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><light pos="0 0 3"/><geom size="1"/></worldbody></mujoco>')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 64, 64) as renderer:
    renderer.update_scene(data)
    assert renderer.render().any()
"""


def set_up_opengl() -> str | None:
    """Set `MUJOCO_GL` to an OpenGL that draws here, or to `disable` if none does.

    One that the user has set is the only candidate. Call it before MuJoCo is imported.

    Returns:
        What is missing, in one line; None if nothing is.
    """
    loaded = sys.modules.get("dm_control._render")
    if loaded is not None and loaded.BACKEND not in _RENDERERS:
        return "DMControl was imported without OpenGL before frames were asked for"
    given = os.environ.get("MUJOCO_GL", "").strip().lower() if loaded is None else loaded.BACKEND
    candidates = [given] if given else _candidates()
    working = next(filter(draws, candidates), None)
    # A broken one must not stay: already the import of MuJoCo would fail with it.
    os.environ["MUJOCO_GL"] = working or _DISABLED
    if working:
        return None
    tried = f"with MUJOCO_GL={given} (unset it to try others)" if given else f"(tried {' and '.join(candidates)})"
    return f"MuJoCo cannot draw here {tried}: {HINT}"


@cache
def draws(renderer: str) -> bool:
    """Tell whether MuJoCo draws with `MUJOCO_GL=renderer`.

    It is tried in a process of its own, since a broken driver may abort the one that it is in.
    """
    if renderer not in _RENDERERS:
        return False
    command, environment = [sys.executable, "-c", _PROBE], os.environ | {"MUJOCO_GL": renderer}
    try:
        probe = subprocess.run(command, env=environment, capture_output=True, timeout=_PROBE_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return False
    return probe.returncode == 0


def try_to_draw(make: Callable[[], gymnasium.Env], missing: str | None) -> None:
    """Make an environment and draw its first frame.

    Args:
        make: Makes it.
        missing: What `set_up_opengl` returned. It is no error yet, for not every task needs OpenGL.

    Raises:
        RenderError: If either fails.
    """
    try:
        with closing(make()) as env:
            if missing is not None and _is_mujoco(env):
                # Gymnasium's renderer is not even tried: where its start fails, its finaliser does so too.
                raise RenderError(missing)
            env.reset(seed=0)
            draw(env)
    except RenderError:
        raise
    except Exception as error:
        raise RenderError(_one_line(error)) from error


def draw(env: gymnasium.Env) -> np.ndarray:
    """Return a picture of the environment as it is, `[H, W, 3]` uint8; the array is the caller's own.

    Raises:
        RenderError: Whatever the reason; the environment can still be stepped.
    """
    try:
        return _picture(env.render())
    except Exception as error:
        raise RenderError(_one_line(error)) from error


def _candidates() -> list[str]:
    # Without a display GLFW could only fail.
    return [name for name in _RENDERERS if name != "glfw" or os.environ.get("DISPLAY")]


def _is_mujoco(env: gymnasium.Env) -> bool:
    return isinstance(env.unwrapped, DMControl) or hasattr(env.unwrapped, "mujoco_renderer")


def _picture(frame: object) -> np.ndarray:
    if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
        raise TypeError("render() returned no picture [height, width, 3] of uint8")
    return frame.copy()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
