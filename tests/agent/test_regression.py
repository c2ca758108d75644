import math

import pytest
import torch

from tdmpc.agent.regression import TwoHot


def test_a_target_that_is_not_a_number_gives_a_loss_that_is_none_and_infinity_is_the_last_bin():
    targets = torch.tensor([[torch.nan], [torch.inf], [1.0]])
    loss = TwoHot(101, -10.0, 10.0).cross_entropy(torch.zeros(3, 101), targets)
    assert loss.isfinite().flatten().tolist() == [False, True, True]
    assert loss[1].item() == pytest.approx(math.log(101))
