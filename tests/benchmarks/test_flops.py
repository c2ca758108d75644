import pytest
import torch
from torch import nn

from tdmpc.agent.layers import Ensemble, mlp, run_stacked
from tdmpc.benchmarks.flops import PEAK_ROWS, PEAK_WIDTH, count_flop, measure_peak, peak_share
from tdmpc.benchmarks.timing import Stopwatch
from tests.benchmarks.test_timing import Clock

# 3 -> 4 -> 5 numbers, 7 rows: so many multiplications, each with an addition.
FIRST, SECOND = 7 * 3 * 4, 7 * 4 * 5
FORWARD = 2 * (FIRST + SECOND)
# The gradients of both weights and of the second layer's input; the first layer's input needs none.
BACKWARD = 2 * (FIRST + 2 * SECOND)
SUMS = 2 * 2 * 7 * (4 + 4 + 4 + 5)  # gradients of two biases and a LayerNorm: products with two rows of ones


@pytest.fixture
def x():
    return torch.randn(7, 3)


def test_products_are_counted_forwards_and_backwards(x):
    net = mlp(3, [4], 5)
    assert count_flop(lambda: net(x)) == {torch.float32: FORWARD}
    assert count_flop(lambda: net(x).sum().backward()) == {torch.float32: FORWARD + BACKWARD + SUMS}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_are_counted_without_gradients(x, mode):
    net = mlp(3, [4], 5)

    def call():
        with mode():
            net(x.view(1, 7, 3))

    assert count_flop(call) == {torch.float32: FORWARD}


def test_products_of_stacked_networks_count_for_every_network(x):
    net = Ensemble(6, 3, [4], 5)
    assert count_flop(lambda: run_stacked(net.layers(), x)) == {torch.float32: 6 * FORWARD}
    assert count_flop(lambda: run_stacked(net.layers(torch.tensor([0, 3])), x)) == {torch.float32: 2 * FORWARD}


def test_the_precision_of_a_product_is_that_in_which_it_is_computed(x):
    net, last = mlp(3, [4], 5), nn.Linear(5, 2)

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        last(y.float())

    assert count_flop(call) == {torch.bfloat16: FORWARD, torch.float32: 2 * 7 * 5 * 2}


def test_what_is_compiled_is_counted_without_compiling(x):
    net = mlp(3, [4], 5)

    def backend(*_):
        raise AssertionError("compiled")

    assert count_flop(torch.compile(lambda: net(x), backend=backend)) == {torch.float32: FORWARD}


def test_what_multiplies_nothing_counts_as_nothing(x):
    assert count_flop(lambda: x.softmax(-1).exp().sum()) == {}


def test_the_peak_is_that_of_a_linear_layer():
    clock = Clock()
    # Waiting for the device is made to take a second, before and after the call: one of them counts.
    stopwatch = Stopwatch(repeats=3, budget_s=1, clock=clock, synchronize=clock.takes(1))
    peak = measure_peak(torch.float32, torch.device("cpu"), stopwatch)
    assert peak == 2 * PEAK_ROWS * PEAK_WIDTH * PEAK_WIDTH == 2 * 2048 * 512 * 512


def test_the_share_of_peak_is_the_time_that_products_would_take_at_it():
    peaks = {torch.float32: 100.0, torch.bfloat16: 400.0}
    assert peak_share({torch.float32: 50}, peaks, seconds=2.0) == 0.25
    assert peak_share({torch.float32: 50, torch.bfloat16: 200}, peaks, seconds=2.0) == 0.5
    assert peak_share({}, peaks, seconds=2.0) is None
    assert peak_share({torch.float64: 50}, peaks, seconds=2.0) is None
