import io
import math

import pytest
import torch
from torch import nn

from tdmpc.merging.strategies import (
    Elastic,
    Mean,
    Nesterov,
    RunningMean,
    Weighted,
    copy_into,
    distance,
    softmax_weights,
)


def state(value, count=0, flag=False):
    return {
        "weight": torch.full((2, 3), float(value)),
        "half": torch.tensor([float(value)], dtype=torch.bfloat16),
        "double": torch.tensor(float(value), dtype=torch.float64),
        "count": torch.tensor([count, -count]),
        "flag": torch.tensor(flag),
    }


def mean_of(states, weights=None):
    mean = RunningMean()
    for one, weight in zip(states, weights or [1.0] * len(states), strict=True):
        mean.add(one, weight)
    return mean.result()


def bits(one):
    return {name: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).tolist()) for name, tensor in one.items()}


def test_three_workers_end_at_the_mean_of_their_weights():
    mean = mean_of([state(1, 3), state(2, 7, True), state(6, 5)])
    assert torch.equal(mean["weight"], torch.full((2, 3), 3.0))
    assert mean["half"].dtype == torch.bfloat16
    assert mean["half"].item() == 3
    assert mean["double"].dtype == torch.float64
    assert mean["double"].item() == 3
    assert mean["count"].tolist() == [7, -3]
    assert mean["flag"].item() is True


def test_half_precision_is_rounded_once_and_not_in_every_sum():
    values = [256.0, *[1.0] * 7]  # bfloat16 has no 257, so that adding ones to 256 would get nowhere
    states = [{"x": torch.tensor(value, dtype=torch.bfloat16)} for value in values]
    assert mean_of(states)["x"].item() == torch.tensor(263 / 8, dtype=torch.bfloat16).item()


def test_weights_need_not_sum_to_one_and_count_only_if_added():
    assert mean_of([state(1), state(2), state(6)], [2, 4, 4])["double"].item() == pytest.approx(3.4, rel=1e-15)
    assert mean_of([state(1), state(6)], [2, 4])["double"].item() == pytest.approx(26 / 6, rel=1e-15)


def test_the_mean_of_equal_states_is_that_state_whatever_the_weights():
    torch.manual_seed(0)
    one = {"x": torch.randn(1001), "y": torch.randn(7).bfloat16()}
    assert bits(mean_of([one] * 7, [0.1, 3, 0.7, 1e-300, 1e9, 2, 1])) == bits(one)


def test_the_same_order_gives_the_same_bits_whatever_the_threads():
    torch.manual_seed(0)
    states = [{"x": torch.randn(100_003)} for _ in range(3)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(mean_of(states, [0.3, 1.7, 0.9]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0]["x"], results[1]["x"])


def test_averaging_leaves_what_is_averaged_alone():
    states = [state(1, 3), state(2, 7)]
    before = [bits(one) for one in states]
    result = mean_of(states)
    result["weight"].zero_()
    assert [bits(one) for one in states] == before
    alone = mean_of(states[:1])
    assert alone["weight"].data_ptr() != states[0]["weight"].data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, r"weight is float32 \[3, 2\], not float32 \[2, 3\]"),
        ({"count": torch.zeros(2)}, r"count is float32 \[2\], not int64 \[2\]"),
        ({"more": torch.zeros(1)}, "more is float32 .*, not missing"),
    ],
)
def test_a_state_of_another_kind_is_refused_and_changes_nothing(change, message):
    mean = RunningMean()
    mean.add(state(1), 1.0)
    with pytest.raises(ValueError, match=message):
        mean.add(state(5) | change, 1.0)
    mean.add(state(2), 1.0)
    assert mean.result()["double"].item() == 1.5


def test_nothing_has_no_mean_and_a_weight_is_positive():
    with pytest.raises(ValueError, match="no mean"):
        RunningMean().result()
    for weight in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="weight"):
            RunningMean().add(state(1), weight)


def test_merging_changes_live_weights_in_place_and_training_goes_on_with_them():
    model, target = nn.Linear(2, 1), torch.tensor([10.0])
    identities = [id(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2)).sub(target).square().sum().backward()
    optimizer.step()
    merged = {name: torch.full_like(tensor, 3.0) for name, tensor in model.state_dict().items()}
    copy_into(model.state_dict(), merged)
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert torch.equal(model.weight, torch.full((1, 2), 3.0))
    optimizer.zero_grad()
    model(torch.ones(2)).sub(target).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, torch.full((1, 2), 3.0))
    assert torch.equal(merged["weight"], torch.full((1, 2), 3.0))


def test_copying_keeps_types_and_refuses_what_would_be_broadcast():
    live = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    copy_into(live, {"a": torch.ones(2), "b": torch.ones(2)})
    assert live["a"].dtype == torch.bfloat16
    assert live["a"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"b is of shape \[1\], not \[2\]"):
        copy_into(live, {"a": torch.zeros(2), "b": torch.zeros(1)})
    with pytest.raises(ValueError, match="b is of shape None"):
        copy_into(live, {"a": torch.zeros(2)})
    assert live["a"].tolist() == [1, 1]


def test_the_distance_is_relative_and_over_floating_tensors_only():
    own = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0], dtype=torch.bfloat16), "n": torch.tensor([1])}
    merged = {"a": torch.tensor([3.0]), "b": torch.tensor([5.0], dtype=torch.bfloat16), "n": torch.tensor([100])}
    assert distance(own, merged) == pytest.approx(0.2)
    assert distance(own, own) == 0
    zeros = {"a": torch.zeros(1)}
    assert distance(zeros, zeros) == 0
    assert distance(zeros, {"a": torch.ones(1)}) == math.inf


def test_mean_and_weighted_continue_with_the_mean():
    for strategy in (Mean(), Weighted()):
        strategy.begin(state(0))
        assert bits(strategy.step(state(1), state(3))) == bits(state(3))
    assert Mean().weights([1.0, None]) == [1.0, 1.0]


@pytest.mark.parametrize("returns", [[], [5.0], [7.0, 7.0, 7.0], [None, None], [math.nan, 3.0, None], [0.1] * 3])
def test_weights_are_equal_where_returns_say_nothing(returns):
    assert softmax_weights(returns, 1.0) == [1.0] * len(returns)


def test_higher_returns_weigh_more_and_unknown_ones_like_the_average():
    low, none, infinite, middle, high = softmax_weights([10.0, None, math.inf, 20.0, 30.0], 1.0)
    assert low < middle < high
    assert none == infinite == middle
    assert high / middle == pytest.approx(math.exp(math.sqrt(1.5)))


def test_weights_depend_neither_on_scale_nor_on_offset_and_never_vanish():
    expected = softmax_weights([1.0, 2.0, 4.0], 0.5)
    assert softmax_weights([100.0, 200.0, 400.0], 0.5) == pytest.approx(expected)
    assert softmax_weights([1e150 - 1, 1e150, 3e150], 0.5)[2] == 1
    extreme = softmax_weights([0.0, 1.0], 1e-9)
    assert extreme[1] == 1
    assert 0 < extreme[0] < 1e-200


def test_elastic_pulls_towards_the_mean_and_workers_stay_different():
    elastic = Elastic(alpha=0.25)
    pulled = elastic.step(state(2, 1), state(6, 5, True))
    assert pulled["weight"][0, 0].item() == 3
    assert pulled["half"].item() == 3
    assert pulled["half"].dtype == torch.bfloat16
    assert pulled["count"].tolist() == [5, -5]
    assert pulled["flag"].item() is True
    workers = [state(value) for value in (1, 2, 6)]
    for _ in range(3):
        mean = mean_of(workers)
        workers = [elastic.step(worker, mean) for worker in workers]
    expected = [3 - 2 * 0.75**3, 3 - 0.75**3, 3 + 3 * 0.75**3]
    assert [worker["double"].item() for worker in workers] == pytest.approx(expected)


def trained(name):
    return name in ("weight", "half")


def test_nesterov_takes_the_steps_of_torch_with_the_way_back_to_the_mean_as_gradient():
    nesterov = Nesterov(trained, lr=0.7, momentum=0.9)
    nesterov.begin(state(1))
    reference = torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for value in (2.0, 5.0, -1.0):
        merged = nesterov.step(state(77), state(value, 4))
        reference.grad = reference.detach() - value
        optimizer.step()
        assert merged["weight"][0, 0].item() == pytest.approx(reference.item(), rel=1e-6)
        assert merged["half"].dtype == torch.bfloat16
        assert merged["double"].item() == value
        assert merged["count"].tolist() == [4, -4]


def test_nesterov_without_momentum_and_rate_one_is_the_mean():
    nesterov = Nesterov(trained, lr=1.0, momentum=0.0)
    nesterov.begin(state(1))
    assert bits(nesterov.step(state(5), state(3))) == bits(state(3))


def test_nesterov_continues_from_a_state_that_was_saved_without_pickle():
    first, second = Nesterov(trained), Nesterov(trained)
    first.begin(state(1))
    first.step(state(1), state(2))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    expected = first.step(state(1), state(7))
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert bits(second.step(state(1), state(7))) == bits(expected)


def test_nesterov_remembers_weights_that_go_on_changing():
    live, nesterov = state(1), Nesterov(trained, lr=0.5, momentum=0.0)
    nesterov.begin(live)
    copy_into(live, state(50))
    assert nesterov.step(live, state(3))["weight"][0, 0].item() == 2  # halfway from 1 to 3
    kept = nesterov.state_dict()
    nesterov.step(live, state(9))
    assert kept["point"]["weight"][0, 0].item() == 2


def test_strategies_that_remember_nothing_save_nothing():
    for strategy in (Mean(), Weighted(), Elastic()):
        assert strategy.state_dict() == {}
        strategy.load_state_dict({})
