import os
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from envs import RenderError, make_vector, rendering
from envs.rendering import HINT, draws, set_up_opengl
from tests.envs.test_tasks import run_python
from tests.toys import MAX_EPISODE_STEPS, Toy

PAINTED = "gym:tests.envs.test_rendering:ToyPainted-v0"

ROLL = """
import hashlib, os, sys
import numpy as np
from envs import make_vector

render = sys.argv[1] == "render"
for task in ("walker-walk", "gym:HalfCheetah-v5"):
    digest, frames = hashlib.sha256(), []
    with make_vector(task, 2, "sync", render=render) as vector:
        rng = np.random.default_rng(0)
        digest.update(vector.reset(np.ones(2, bool), [3, 4]))
        for _ in range(15):
            step = vector.step(rng.uniform(-1, 1, (2, vector.action_size)).astype(np.float32))
            digest.update(step.obs)
            digest.update(step.reward)
            frames += [vector.render(0)] if render else []
    print(digest.hexdigest())
    if render:
        assert all(frame.dtype == np.uint8 and frame.shape == frames[0].shape for frame in frames)
        assert frames[0].std() > 5 and (frames[0] != frames[-1]).mean() > 0.01
        print(os.environ["MUJOCO_GL"], *frames[0].shape, vector.render_fps, file=sys.stderr)
assert render or not any("OpenGL" in name for name in sys.modules)
"""


class ToyPainted(Toy):
    """Paint what is observed; a picture fails at step `torn_at`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 - as gymnasium has it

    def __init__(self, render_mode: str | None = None, torn_at: int = -1, **options) -> None:
        super().__init__(**options)
        self.render_mode, self._torn_at = render_mode, torn_at
        self._canvas = np.zeros((4, 6, 3), np.uint8)

    def render(self):
        assert self.render_mode == "rgb_array"
        if self._obs[2] == self._torn_at:
            raise OSError("the picture\nis torn")
        self._canvas[:] = self._obs
        return self._canvas


gymnasium.register("ToyPainted-v0", ToyPainted, max_episode_steps=MAX_EPISODE_STEPS)


def painted(num_envs=2, vector="sync", **options):
    vector = make_vector(PAINTED, num_envs, vector, {"min_length": 10, **options}, render=True)
    vector.reset(np.ones(num_envs, bool), range(num_envs))
    return vector


def step(vector):
    return vector.step(np.zeros((vector.num_envs, vector.action_size), np.float32))


@pytest.fixture
def working(monkeypatch):
    """Say which renderers work; nothing else has been chosen or imported."""
    renderers = set()
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delitem(sys.modules, "dm_control._render", raising=False)
    monkeypatch.setattr(rendering, "draws", renderers.__contains__)
    return renderers


@pytest.fixture(scope="module")
def opengl():
    if not any(map(draws, ("egl", "osmesa"))):
        pytest.skip(f"no OpenGL draws here: {HINT}")


def test_drawing_changes_no_bit_of_an_episode(opengl):
    drawn = run_python(f"import sys; sys.argv.append('render')\n{ROLL}")
    plain = run_python(f"import sys; sys.argv.append('plain')\n{ROLL}", MUJOCO_GL="disable")
    assert plain.returncode == 0, plain.stderr
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout == plain.stdout
    pictures = [line.split()[1:] for line in drawn.stderr.splitlines() if line.startswith(("egl", "osmesa", "glfw"))]
    assert pictures == [["384", "384", "3", "20.0"], ["480", "480", "3", "20.0"]]


def test_without_opengl_the_reason_is_told_and_states_are_still_there():
    result = run_python(
        "import sys\n"
        "from envs import *\n"
        "for task in ('gym:HalfCheetah-v5', 'walker-walk'):\n"
        "    try: make_vector(task, 1, render=True)\n"
        "    except RenderError as error: print(error)\n"
        "    with make_vector(task, 1) as vector: print(vector.observation_size)\n"
        "print([name for name in sys.modules if 'OpenGL' in name])",
        MUJOCO_GL="disable",
    )
    assert "Traceback" not in result.stderr, "not even from a finaliser"
    reason = f"MuJoCo cannot draw here with MUJOCO_GL=disable (unset it to try others): {HINT}"
    assert result.stdout.splitlines() == [reason, "17", reason, "24", "[]"]


def test_a_renderer_that_aborts_its_process_does_not_work(monkeypatch):
    monkeypatch.setattr(rendering, "_PROBE", "import os; os.kill(os.getpid(), 9)")
    assert not draws.__wrapped__("egl")


@pytest.mark.parametrize(
    ("works", "display", "chosen"),
    [
        ({"egl", "osmesa", "glfw"}, ":0", "egl"),
        ({"osmesa", "glfw"}, ":0", "osmesa"),
        ({"glfw"}, ":0", "glfw"),
    ],
)
def test_the_first_renderer_that_works_is_chosen(monkeypatch, working, works, display, chosen):
    monkeypatch.setenv("DISPLAY", display)
    working |= works
    assert set_up_opengl() is None
    assert os.environ["MUJOCO_GL"] == chosen


def test_without_a_display_no_window_is_tried(working):
    working.add("glfw")
    assert set_up_opengl() == f"MuJoCo cannot draw here (tried egl and osmesa): {HINT}"
    assert os.environ["MUJOCO_GL"] == "disable"


def test_what_the_user_has_set_is_not_replaced_by_another_renderer(monkeypatch, working):
    working.add("osmesa")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert "with MUJOCO_GL=egl (unset it to try others): " in set_up_opengl()
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert set_up_opengl() is None


def test_it_is_too_late_once_dmcontrol_is_imported_without_opengl(monkeypatch, working):
    working.add("egl")
    monkeypatch.setitem(sys.modules, "dm_control._render", SimpleNamespace(BACKEND="off"))
    assert "before frames were asked for" in set_up_opengl()
    monkeypatch.setitem(sys.modules, "dm_control._render", SimpleNamespace(BACKEND="egl"))
    assert set_up_opengl() is None


def test_each_environment_is_drawn_as_it_is(working):
    with painted() as vector:
        assert vector.render_fps == 8
        first = vector.render(1)
        step(vector)
        step(vector)
        np.testing.assert_array_equal(first, np.broadcast_to([1, 0, 0], (4, 6, 3)))
        np.testing.assert_array_equal(vector.render(0), np.broadcast_to([0, 0, 2], (4, 6, 3)))


def test_environments_that_are_drawn_are_in_this_process(working):
    with painted(vector="async") as vector:
        assert vector.mode == "sync"
    with make_vector(PAINTED, 1, "async") as children, pytest.raises(RenderError, match="other processes"):
        children.render(0)


def test_a_picture_that_fails_leaves_the_episode_as_it_is(working):
    with painted(torn_at=1) as vector:
        step(vector)
        with pytest.raises(RenderError, match=r"^OSError: the picture is torn$"):
            vector.render(0)
        assert step(vector).obs[0, 2] == 2
        assert vector.render(0).shape == (4, 6, 3)


def test_a_task_that_cannot_be_drawn_says_so_when_it_is_made(working):
    with pytest.raises(RenderError, match="render_mode"):
        make_vector("gym:tests.toys:Toy-v0", 1, render=True)
    with pytest.raises(RenderError, match="is torn"):
        painted(torn_at=0)
    make_vector("gym:tests.toys:Toy-v0", 1).close()


def test_a_missing_package_is_named(monkeypatch, working):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(RenderError, match="pip install"):
        make_vector("gym:Pendulum-v1", 1, render=True)


def test_environments_that_were_not_made_for_it_are_not_drawn():
    with make_vector(PAINTED, 1, "sync") as vector:
        with pytest.raises(RenderError):
            vector.render(0)
        vector.reset(np.ones(1, bool), [0])
        with pytest.raises(RenderError):
            vector.render(0)
