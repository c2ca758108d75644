import os
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest

from envs import TaskError, check_task
from envs.tasks import SUITE_TASKS, make_env

TOY = "gym:tests.toys:Toy-v0"


def run_python(code, **environ):
    environment = {name: value for name, value in os.environ.items() if name != "MUJOCO_GL"} | environ
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_table_has_every_task_of_the_suite():
    from dm_control import suite

    assert sorted(SUITE_TASKS.values()) == sorted(suite.ALL_TASKS)


@pytest.mark.parametrize(
    "task",
    ["walker-walk", "cup-catch", "pointmass-easy", "finger-turn-hard", "humanoid_CMU-run", "cartpole-balance-sparse"],
)
def test_published_names_resolve(task):
    check_task(task)


@pytest.mark.parametrize(
    ("task", "observation_size", "action_size"),
    [
        ("walker-walk", 24, 6),
        ("cup-catch", 8, 2),
        ("pointmass-easy", 4, 2),
        ("fish-swim", 24, 5),
        ("lqr-lqr-2-1", 4, 1),
    ],
)
def test_suite_tasks_are_made(task, observation_size, action_size):
    env = make_env(task)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (observation_size,)
    assert obs.dtype == np.float32
    assert env.action_space == gymnasium.spaces.Box(-1, 1, (action_size,), np.float32)
    assert env.get_wrapper_attr("max_episode_steps") == 500


@pytest.mark.parametrize(
    ("task", "closest"),
    [
        ("walker-wlak", "walker-walk"),
        ("ball_in_cup-catch", "cup-catch"),
        ("point_mass-easy", "pointmass-easy"),
        ("Walker_Run", "walker-run"),
        ("gym:Pendulum-v9", "gym:Pendulum-v1"),
        ("gym:halfcheetah-v5", "gym:HalfCheetah-v5"),
        ("Pendulum-v1", "gym:Pendulum-v1"),
        ("gym:tests.toys:Toi-v0", TOY),
    ],
)
def test_an_unknown_task_is_refused_with_the_closest_names(task, closest):
    with pytest.raises(TaskError) as error:
        check_task(task)
    assert closest in one_line(error).partition("closest: ")[2].split(", ")


def test_a_name_like_no_other_is_refused_without_advice():
    with pytest.raises(TaskError, match=r"^task=zzzzzz: unknown$"):
        check_task("zzzzzz")


def test_options_of_a_suite_task_are_refused():
    with pytest.raises(TaskError) as error:
        check_task("walker-walk", {"gravity": 3})
    assert "gravity" in one_line(error)


def test_windows_are_not_opened():
    with pytest.raises(TaskError) as error:
        make_env("gym:Pendulum-v1", {"render_mode": "human"})
    assert one_line(error).startswith("env.render_mode=human: ")


def test_options_are_passed_on_to_gymnasium():
    env = make_env("gym:Pendulum-v1", {"g": 3.0, "max_episode_steps": 7})
    assert env.unwrapped.g == 3.0
    assert env.get_wrapper_attr("max_episode_steps") == 7


def test_an_option_that_the_environment_does_not_have_is_refused():
    with pytest.raises(TaskError) as error:
        make_env("gym:Pendulum-v1", {"gravitas": 3.0})
    assert "gravitas" in one_line(error)


@pytest.mark.parametrize(
    ("task", "needed"),
    [
        ("gym:CartPole-v1", "a bounded Box of floats"),
        ("gym:tests.toys:ToyDiscrete-v0", "a bounded Box of floats"),
        ("gym:tests.toys:ToyIdle-v0", "a bounded Box of floats"),
        ("gym:tests.toys:ToyBlind-v0", "a Box of floats"),
        ("gym:tests.toys:ToyDict-v0", "a Box of floats"),
        ("gym:tests.toys:ToyEndless-v0", "env.max_episode_steps=N"),
        ("gym:no_such_package.toys:Toy-v0", "no module 'no_such_package'"),
        ("gym:Walker2d-v3", "moved to the gymnasium-robotics project"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of date")
def test_what_the_agent_cannot_use_is_refused_with_what_it_needs(task, needed):
    with pytest.raises(TaskError) as error:
        make_env(task)
    assert needed in one_line(error)


def test_a_limit_of_steps_can_be_given_as_an_option():
    assert make_env("gym:tests.toys:ToyEndless-v0", {"max_episode_steps": 9}).get_wrapper_attr("max_episode_steps") == 9


def test_a_module_in_the_current_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_package_here.py").write_text("import tests.toys")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    check_task("gym:my_package_here:Toy-v0")


def test_an_error_inside_a_users_module_propagates(tmp_path, monkeypatch):
    (tmp_path / "my_broken_package.py").write_text("import no_such_dependency")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        check_task("gym:my_broken_package:Toy-v0")


def test_refusing_a_name_is_quick_and_imports_no_simulator():
    start = time.monotonic()
    result = run_python(
        "import sys, envs\n"
        "try: envs.check_task('walker-wlak')\n"
        "except envs.TaskError: print([m for m in ('torch', 'dm_control', 'mujoco', 'tdmpc') if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr
    assert time.monotonic() - start < 3


def test_states_need_no_opengl():
    result = run_python(
        "import sys\n"
        "from envs.tasks import make_env\n"
        "env = make_env('walker-walk'); env.reset(seed=0); env.step(env.action_space.sample())\n"
        "print([name for name in sys.modules if 'OpenGL' in name or 'glfw' in name])"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_the_task_that_needs_opengl_says_so():
    result = run_python(
        "from envs import *\ntry: make_vector('quadruped-escape', 1)\nexcept TaskError as error: print(error)",
        MUJOCO_GL="disable",
    )
    assert "needs OpenGL" in result.stdout
    assert result.stdout.count("\n") == 1
