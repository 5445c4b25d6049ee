"""Whitening over the tokens that count."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import combine_moments, masked_moments, whiten
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def all_of(x):
    """A mask where everything counts."""
    return torch.ones_like(x, dtype=torch.bool)


def test_mean_removed_or_kept(impl):
    # slime#1369: with n − 1, and the mean added back
    x = torch.tensor([2.0, 4, 6])
    assert_close(whiten(x, all_of(x), impl=impl), torch.tensor([-1.0, 0, 1]), **CLOSE)
    kept = whiten(x, all_of(x), shift_mean=False, impl=impl)
    assert_close(kept, torch.tensor([3.0, 4, 5]), **CLOSE)


def test_one_token(impl):
    # stable-baselines3#325: the deviation of one value
    x, mask = torch.tensor([3.0, 9.0]), torch.tensor([True, False])
    assert torch.equal(whiten(x, mask, impl=impl), torch.zeros(2))
    kept = whiten(x, mask, shift_mean=False, impl=impl)
    assert torch.equal(kept, torch.tensor([3.0, 0]))
    assert torch.equal(whiten(x, mask & False, impl=impl), torch.zeros(2))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_equal_values_are_finite(impl, shift_mean):
    x = torch.full((2, 5), 0.1)
    got = whiten(x, all_of(x), shift_mean=shift_mean, impl=impl)
    # rounding of the mean, 1e-8, is blown up by 1/sqrt(eps) = 1e4
    assert_close(got, torch.full((2, 5), 0.0 if shift_mean else 0.1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_budget(impl, shift_mean, dtype):
    x, mask = (torch.randn(9, 130) * 2.6 + 1.15).to(dtype), torch.rand(9, 130) < 0.7
    got = whiten(x, mask, shift_mean=shift_mean, impl=impl)
    truth = whiten(x.double(), mask, shift_mean=shift_mean, impl="reference")
    own = whiten(x, mask, shift_mean=shift_mean, impl="reference")
    assert got.dtype == torch.float32
    assert_within_error_budget(got, truth, own)


def test_result_has_mean_zero_and_variance_one(impl):
    x, mask = torch.randn(40, 30) * 5 + 3, torch.rand(40, 30) < 0.5
    got = whiten(x, mask, impl=impl)[mask]
    assert_close(got.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    assert_close(got.var(), torch.tensor(1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 1e30])
def test_masked_places_have_no_effect(impl, rubbish):
    x, mask = torch.randn(4, 6), torch.rand(4, 6) < 0.6
    got = whiten(torch.where(mask, x, rubbish), mask, impl=impl)
    assert torch.equal(got, whiten(x, mask, impl=impl))
    assert (got[~mask] == 0).all()


def test_parts_with_joint_moments_are_the_whole(impl):
    # ranks that whiten by themselves remove the difference between them
    x, mask = torch.randn(6, 20), torch.rand(6, 20) < 0.7
    x[:3] += 4
    halves = [(x[:3], mask[:3]), (x[3:], mask[3:])]
    joint = combine_moments(torch.stack([masked_moments(*h, impl=impl) for h in halves]))
    parts = torch.cat([whiten(*h, moments=joint, impl=impl) for h in halves])
    assert_close(parts, whiten(x, mask, impl=impl), rtol=1e-5, atol=1e-5)


def test_given_moments_are_used(impl):
    x = torch.tensor([1.0, 2.0])
    got = whiten(x, all_of(x), moments=torch.tensor([3.0, 10.0, 8.0]), impl=impl)
    assert_close(got, torch.tensor([-4.5, -4.0]), **CLOSE)


def test_eps(impl):
    x = torch.tensor([-1.0, 1.0])  # variance 2
    assert_close(whiten(x, all_of(x), eps=2.0, impl=impl), x / 2, **CLOSE)


def test_nan_where_a_token_counts_stays(impl):
    x = torch.tensor([1.0, math.nan, 3.0])
    assert whiten(x, all_of(x), impl=impl).isnan().all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty(impl, shape):
    x = torch.randn(shape)
    assert whiten(x, all_of(x), impl=impl).shape == shape


def test_any_strides_and_no_gradient(impl):
    x = torch.randn(8, 6, requires_grad=True).T
    mask = torch.rand(6, 16)[:, ::2] < 0.7
    got = whiten(x, mask, impl=impl)
    want = whiten(x.contiguous(), mask.contiguous(), impl=impl)
    assert_close(got, want, rtol=0, atol=1e-6)
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"mask": torch.ones(3)},
            TypeError,
            "mask must be bool (True = the token counts), got torch.float32",
        ),
        ({"eps": -1e-8}, ValueError, "eps must not be negative, got -1e-08"),
        (
            {"moments": torch.zeros(2)},
            ValueError,
            "moments must have shape [3] (n, mean, M2), got [2]",
        ),
        (
            {"x": torch.zeros(3, dtype=torch.int64)},
            TypeError,
            "x must be a floating-point tensor, got torch.int64",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {"x": torch.zeros(3), "mask": torch.tensor([True, True, False])} | change
    with pytest.raises(error) as caught:
        whiten(**arguments)
    assert str(caught.value) == message
