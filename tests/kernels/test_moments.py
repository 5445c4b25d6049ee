"""Count, mean and squared deviations, and how parts of them add up."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import combine_moments, masked_moments
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def test_on_paper(impl):
    # 2, 4, 6: mean 4, squared deviations 4 + 0 + 4
    x = torch.tensor([[2.0, 100, 4], [math.nan, 6, math.inf]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert_close(masked_moments(x, mask, impl=impl), torch.tensor([3.0, 4, 8]), **CLOSE)


def test_mean_divides_by_what_counts(impl):
    # stable-baselines3-contrib#78: it divided by all elements
    x, mask = torch.tensor([1.0, 3, 5, 7]), torch.tensor([True, True, False, False])
    assert masked_moments(x, mask, impl=impl)[1] == 2


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 3)])
def test_nothing_counts(impl, shape):
    got = masked_moments(
        torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool), impl=impl
    )
    assert torch.equal(got, torch.zeros(3))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_budget(impl, offset, dtype):
    x, mask = (torch.randn(33, 70) + offset).to(dtype), torch.rand(33, 70) < 0.6
    got = masked_moments(x, mask, impl=impl)
    truth = masked_moments(x.double(), mask, impl="reference")
    own = masked_moments(x, mask, impl="reference")
    # Three scales, three budgets. The mean is a sum of terms that cancel: theirs is its scale.
    tinies = (0.0, 2.4e-7 * x.abs().max().item(), None)
    for g, t, o, tiny in zip(got, truth, own, tinies, strict=True):
        assert_within_error_budget(g, t, o, tiny=tiny)


def test_a_large_mean_does_not_swallow_the_variance(impl):
    # E[x²] − E[x]² would give 0 or less here in float32
    x = torch.tensor([4096.0, 4096.25, 4096.5, 4096.75])
    got = masked_moments(x, torch.ones(4, dtype=torch.bool), impl=impl)
    assert_close(got, torch.tensor([4.0, 4096.375, 0.3125]), **CLOSE)


def test_nan_where_a_token_counts_stays(impl):
    x, mask = torch.tensor([1.0, math.nan]), torch.tensor([True, True])
    assert masked_moments(x, mask, impl=impl)[1:].isnan().all()


@pytest.mark.parametrize("cuts", [[4], [1, 5, 6], [0, 9, 9]])
def test_parts_add_up_to_the_whole(impl, cuts):
    x, mask = torch.randn(9, 5) * 3 + 7, torch.rand(9, 5) < 0.7
    parts = zip(x.tensor_split(cuts), mask.tensor_split(cuts), strict=True)
    combined = combine_moments(torch.stack([masked_moments(*p, impl=impl) for p in parts]))
    assert_close(combined, masked_moments(x, mask, impl=impl), rtol=1e-5, atol=1e-5)


def test_two_parts_by_chan():
    # 1, 2 and 6, 7, 8: μ = 24/5, M2 = 0.5 + 2 + (7 − 1.5)²·2·3/5
    parts = torch.tensor([[2, 1.5, 0.5], [3, 7, 2]])
    assert_close(combine_moments(parts), torch.tensor([5, 4.8, 2.5 + 5.5**2 * 6 / 5]), **CLOSE)


def test_parts_of_count_zero_are_neutral():
    parts = torch.tensor([[0, math.nan, math.nan], [2, 1.5, 0.5], [0, 0, 0]])
    assert_close(combine_moments(parts), torch.tensor([2, 1.5, 0.5]), **CLOSE)
    assert torch.equal(combine_moments(torch.zeros(2, 3)), torch.zeros(3))
    assert torch.equal(combine_moments(torch.zeros(0, 3)), torch.zeros(3))


def test_refusals():
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"mask must be bool \(True = the token counts\), got"):
        masked_moments(x, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"mask must have shape \[2, 3\] \(as x\), got \[2\]"):
        masked_moments(x, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"moments must have shape \[R, 3\], got \[3\]"):
        combine_moments(torch.zeros(3))
