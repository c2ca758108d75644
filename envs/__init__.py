"""Gymnasium environments: what tasks there are, how they are made, and how several of them run together."""

from envs.errors import EnvironmentCrash, RenderError, TaskError
from envs.tasks import check_task
from envs.vector import StepResult, VectorEnv, make_vector

__all__ = ["EnvironmentCrash", "RenderError", "StepResult", "TaskError", "VectorEnv", "check_task", "make_vector"]
