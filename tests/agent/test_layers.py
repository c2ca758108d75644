import torch
import torch.nn.functional as F

from tdmpc.agent.layers import Ensemble, SimNorm, draw_heads, mish, mlp, run_stacked


def test_mish_and_its_slope_are_those_of_torch_everywhere():
    x = torch.tensor([-1e4, -100.0, -30.0, *torch.linspace(-12, 25, 400).tolist(), 89.0, 1e4], requires_grad=True)
    weight = torch.linspace(0.5, 2, len(x))
    (ours,) = torch.autograd.grad((mish(x) * weight).sum(), x)
    (theirs,) = torch.autograd.grad((F.mish(x) * weight).sum(), x)
    torch.testing.assert_close(mish(x), F.mish(x), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_mish_slope_is_that_of_its_values():
    x = torch.linspace(-6, 6, 50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mish, (x,))


def test_simnorm_makes_a_simplex_of_every_group_at_a_stride():
    z = SimNorm(8)(torch.randn(5, 32))
    assert z.shape == (5, 32)
    for group in range(4):
        torch.testing.assert_close(z[:, group::4].sum(-1), torch.ones(5))


def test_heads_of_an_ensemble_are_separate_networks():
    ensemble = Ensemble(3, 6, [8, 8], 4)
    single = mlp(6, [8, 8], 4)
    for parameter in ensemble.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 6)
    together = run_stacked(ensemble.layers(), x)
    for head in range(3):
        single.load_state_dict({key: value[head] for key, value in ensemble.state_dict().items()})
        torch.testing.assert_close(together[head], single(x))
    torch.testing.assert_close(run_stacked(ensemble.layers(torch.tensor([2, 0])), x), together[[2, 0]])


def test_two_different_heads_are_drawn_and_every_pair_equally_often():
    pairs = draw_heads(4, 6000, generator=torch.Generator().manual_seed(0)).sort(-1).values
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    expected = [1, 2, 3, 6, 7, 11]  # 01 02 03 12 13 23
    assert counts[expected].sum() == 6000
    assert counts[expected].float().std() < 60
