"""From the name of a task to an environment.

`walker-walk` is a task of the DMControl suite under the name that published TD-MPC2 uses;
`gym:Pendulum-v1` is a Gymnasium id; `gym:my_package:MyEnv-v0` imports `my_package` first.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import gymnasium

from envs.dmcontrol import make_suite_task
from envs.errors import TaskError
from envs.gymnasium_tasks import import_module_of, make_gymnasium_task
from envs.wrappers import FailureGuard

GYMNASIUM_PREFIX = "gym:"

_SHORT_DOMAINS = {"ball_in_cup": "cup", "point_mass": "pointmass"}

# Written down, because importing the suite to refuse a misspelt name would take longer than all else together.
_SUITE = {
    "acrobot": ("swingup", "swingup_sparse"),
    "ball_in_cup": ("catch",),
    "cartpole": ("balance", "balance_sparse", "swingup", "swingup_sparse", "two_poles", "three_poles"),
    "cheetah": ("run",),
    "dog": ("stand", "walk", "trot", "run", "fetch"),
    "finger": ("spin", "turn_easy", "turn_hard"),
    "fish": ("upright", "swim"),
    "hopper": ("stand", "hop"),
    "humanoid": ("stand", "walk", "run", "run_pure_state"),
    "humanoid_CMU": ("stand", "walk", "run"),
    "lqr": ("lqr_2_1", "lqr_6_2"),
    "manipulator": ("bring_ball", "bring_peg", "insert_ball", "insert_peg"),
    "pendulum": ("swingup",),
    "point_mass": ("easy", "hard"),
    "quadruped": ("walk", "run", "escape", "fetch"),
    "reacher": ("easy", "hard"),
    "stacker": ("stack_2", "stack_4"),
    "swimmer": ("swimmer6", "swimmer15"),
    "walker": ("stand", "walk", "run"),
}

SUITE_TASKS: dict[str, tuple[str, str]] = {
    f"{_SHORT_DOMAINS.get(domain, domain)}-{task.replace('_', '-')}": (domain, task)
    for domain, tasks in _SUITE.items()
    for task in tasks
}
"""Every task of the DMControl suite: our name -> (domain, task)."""


def check_task(task: str, options: Mapping[str, Any] | None = None) -> None:
    """Refuse a task that does not exist, without building anything.

    Only the module named in a `gym:module:Id` is imported.

    Raises:
        TaskError: If the name is unknown (the closest names are given), or if a suite task is given options, or
            another task one that is not the user's to choose.
    """
    if options and "render_mode" in options:
        raise TaskError(f"env.render_mode={options['render_mode']}: cannot be chosen; save_video=true makes videos")
    if task.startswith(GYMNASIUM_PREFIX):
        _check_gymnasium_task(task)
    elif task not in SUITE_TASKS:
        raise _unknown(task)
    elif options:
        raise TaskError(f"task={task} takes no options (given: {', '.join(options)}); only gym: tasks do")


def make_env(task: str, options: Mapping[str, Any] | None = None, render: bool = False) -> gymnasium.Env:
    """Make one environment.

    Its observations are float32 `[O]`, its actions float32 `[A]` in [-1, 1]; it has `max_episode_steps`,
    and a physics failure ends its episode instead of raising (`FailureGuard`).

    Args:
        task: A name that `check_task` accepts.
        options: What `gymnasium.make` gets in addition to the id.
        render: Whether frames will be drawn; most Gymnasium environments must be made for it.

    Raises:
        TaskError: If the task is unknown, or does not have what the agent needs.
    """
    check_task(task, options)
    if task.startswith(GYMNASIUM_PREFIX):
        mode = {"render_mode": "rgb_array"} if render else {}
        return FailureGuard(make_gymnasium_task(task.removeprefix(GYMNASIUM_PREFIX), {**mode, **(options or {})}))
    return FailureGuard(make_suite_task(*SUITE_TASKS[task]))


def _check_gymnasium_task(task: str) -> None:
    env_id = import_module_of(task.removeprefix(GYMNASIUM_PREFIX))
    if env_id not in gymnasium.registry:
        raise _unknown(task)


def _unknown(task: str) -> TaskError:
    # A module that was named stays named: without it, what it registers would not be found.
    prefix = task[: task.rindex(":") + 1] if task.startswith(GYMNASIUM_PREFIX) else GYMNASIUM_PREFIX
    names = {_comparable(name): name for name in (*SUITE_TASKS, *(prefix + env_id for env_id in gymnasium.registry))}
    closest = difflib.get_close_matches(_comparable(task), names, n=3)
    hint = f"; closest: {', '.join(names[key] for key in closest)}" if closest else ""
    return TaskError(f"task={task}: unknown{hint}")


def _comparable(name: str) -> str:
    """Keep what is likely to be meant: no prefix, no case, no separators."""
    return re.sub(r"[-_ ]", "", name.rpartition(":")[2].lower())
