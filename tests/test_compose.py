"""What is decided when the parts are put together."""

import pytest
import torch

from tdmpc.agent.compute import EAGER, Compute, has_fast_bf16
from tdmpc.compose import _num_eval_envs, choose_compute
from tdmpc.config import EvaluateConfig, TrainConfig

CPU = torch.device("cpu")


def chosen(**keys):
    said = []
    return choose_compute(TrainConfig(**keys), CPU, said.append), said


def test_only_a_run_that_is_long_enough_is_compiled():
    assert not chosen(steps=1000)[0].compile
    assert chosen(steps=1500)[0].compile
    assert not chosen(steps=1500, num_envs=4)[0].compile
    assert chosen(steps=10, compile=True)[0].compile
    assert not chosen(compile=False)[0].compile
    evaluation = EvaluateConfig(checkpoint="weights.pt")
    assert choose_compute(evaluation, CPU, print) == EAGER


def test_without_a_compiler_there_is_a_warning_and_no_compiling(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compute, said = chosen(compile=True)
    assert not compute.compile
    assert len(said) == 1
    assert "C++ compiler" in said[0]


def test_bfloat16_is_taken_where_it_is_faster_or_asked_for():
    assert chosen()[0].plan_dtype == torch.float32
    compute, _ = chosen(precision="auto", update_precision="fp32")
    assert compute.plan_dtype == (torch.bfloat16 if has_fast_bf16(CPU) else torch.float32)
    assert compute.update_dtype == torch.float32
    assert chosen(precision="auto", compile=False)[0] == EAGER
    assert chosen(precision="bf16", compile=False)[0] == Compute(torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_envs", "eval_episodes", "compile", "expected"),
    [(4, 10, True, 4), (4, 2, True, 2), (4, 10, False, 10), (4, 20, False, 10), (4, 2, False, 2)],
)
def test_there_are_never_more_evaluation_environments_than_episodes(num_envs, eval_episodes, compile, expected):
    config = TrainConfig(num_envs=num_envs, eval_episodes=eval_episodes)
    assert _num_eval_envs(config, Compute(compile=compile), CPU) == expected
