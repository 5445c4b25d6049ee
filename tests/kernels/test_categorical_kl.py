"""The exact KL over the vocabulary."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import categorical_kl
from ppo_kernels.testing import assert_within_error_budget

INF = float("inf")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def kl_and_grad(logits, ref_logits, impl, **options):
    """KL and the gradient of its sum."""
    logits = logits.detach().requires_grad_()
    kl = categorical_kl(logits, ref_logits, impl=impl, **options)
    return kl.detach(), torch.autograd.grad(kl.sum(), logits)[0]


def test_two_columns_on_paper(impl):
    # p = [1/4, 3/4], q = [1/2, 1/2]: KL = ln 2 − H(p); d/dx = p·(ln p − ln q − KL)
    kl, grad = kl_and_grad(torch.tensor([[0.0, math.log(3)]]), torch.zeros(1, 2), impl)
    want = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    slopes = [[0.25 * (math.log(0.5) - want), 0.75 * (math.log(1.5) - want)]]
    assert_close(kl, torch.tensor([want]), **CLOSE)
    assert_close(grad, torch.tensor(slopes), **CLOSE)


def test_same_distribution_is_zero_with_a_zero_gradient(impl):
    logits = torch.randn(4, 333) * 5
    kl, grad = kl_and_grad(logits, logits + torch.randn(4, 1), impl)
    assert_close(kl, torch.zeros(4), rtol=0, atol=2e-6)
    assert_close(grad, torch.zeros(4, 333), rtol=0, atol=2e-6)


def test_matches_torch_distributions(impl):
    logits, ref_logits = torch.randn(2, 6, 40) * 3, torch.randn(2, 6, 40)
    p = torch.distributions.Categorical(logits=logits)
    q = torch.distributions.Categorical(logits=ref_logits)
    kl, _ = kl_and_grad(logits, ref_logits, impl)
    assert_close(kl, torch.distributions.kl_divergence(p, q), rtol=1e-5, atol=1e-5)
    assert (kl >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [37, 1025])
def test_values_and_gradients_within_budget(impl, dtype, columns):
    logits, ref_logits = (torch.randn(2, 50, columns) * 2).to(dtype)
    mask, upstream = torch.rand(50) < 0.8, torch.randn(50)

    def run(z, z_ref, impl):
        z = z.clone().requires_grad_()
        kl = categorical_kl(z, z_ref, temperature=0.8, response_mask=mask, impl=impl)
        return kl, torch.autograd.grad(kl, z, upstream.to(kl.dtype))[0]

    truth = run(logits.double(), ref_logits.double(), "reference")
    own = run(logits, ref_logits, "reference")
    for g, t, o in zip(run(logits, ref_logits, impl), truth, own, strict=True):
        assert_within_error_budget(g, t, o)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradcheck(impl):
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ref_logits = torch.randn(3, 5, dtype=torch.float64)
    torch.autograd.gradcheck(lambda z: categorical_kl(z, ref_logits, impl=impl), logits)


def test_columns_banned_by_both_or_by_the_policy(impl):
    kl, grad = kl_and_grad(
        torch.tensor([[0.0, 0.0, -INF], [0.0, 0.0, -INF]]),
        torch.tensor([[0.0, math.log(3), -INF], [0.0, 0.0, 0.0]]),
        impl,
    )
    want = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(1.5)]
    assert_close(kl, torch.tensor(want), **CLOSE)
    assert grad.isfinite().all()
    assert (grad[:, 2] == 0).all()


def test_column_banned_by_the_reference_only_is_infinite(impl):
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    ref_logits = torch.tensor([[0.0, 0.0, -INF], [0.0, 1.0, 2.0]])
    kl, grad = kl_and_grad(logits, ref_logits, impl)
    assert kl[0] == INF
    assert_close(kl[1], torch.tensor(0.0), rtol=0, atol=1e-6)
    assert grad[1].isfinite().all()


def test_torch_gradient_is_finite_where_the_kl_is_not():
    _, grad = kl_and_grad(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, -INF]]), "torch")
    assert grad.isfinite().all()
    assert grad[0, 2] > 0 > grad[0, 0]  # descent takes probability from the banned column


def test_reference_gets_no_gradient(impl):
    logits, ref_logits = torch.randn(2, 3, 5).requires_grad_().unbind()
    kl = categorical_kl(logits.detach(), ref_logits, impl=impl)
    assert not kl.requires_grad


@pytest.mark.parametrize("rubbish", [math.nan, INF])
def test_masked_rows_and_padding_columns_have_no_effect(impl, rubbish):
    mask = torch.tensor([True, False, True])
    logits, ref_logits = torch.randn(2, 3, 6)
    want, want_grad = kl_and_grad(logits, ref_logits, impl)
    dirty, dirty_ref = (
        torch.cat([torch.where(mask[:, None], x, rubbish), torch.full((3, pad), rubbish)], 1)
        for x, pad in ((logits, 2), (ref_logits, 5))
    )
    kl, grad = kl_and_grad(dirty, dirty_ref, impl, response_mask=mask, vocab_size=6)
    assert_close(kl, torch.where(mask, want, 0), rtol=0, atol=1e-6)
    assert_close(grad[:, :6], torch.where(mask[:, None], want_grad, 0), rtol=0, atol=1e-6)
    assert (grad[:, 6:] == 0).all()


def test_any_strides(impl):
    logits, ref_logits = torch.randn(2, 4, 6, 12)[..., ::2].transpose(1, 2).unbind()
    got = kl_and_grad(logits, ref_logits, impl)
    want = kl_and_grad(logits.contiguous(), ref_logits.contiguous(), impl)
    assert_close(got, want, rtol=0, atol=1e-6)


def test_mixed_precision_of_policy_and_reference(impl):
    logits, ref_logits = torch.randn(2, 4, 16)
    got, _ = kl_and_grad(logits.bfloat16(), ref_logits, impl)
    want, _ = kl_and_grad(logits.bfloat16().double(), ref_logits.double(), "reference")
    assert got.dtype == torch.float32
    assert_close(got.double(), want, rtol=0, atol=2e-6)


def test_empty(impl):
    kl, grad = kl_and_grad(torch.randn(0, 3, 5), torch.randn(0, 3, 5), impl)
    assert kl.shape == (0, 3)
    assert grad.shape == (0, 3, 5)


def test_refusals():
    with pytest.raises(ValueError, match=r"ref_logits must have shape \[2, 5\] \(logits\)"):
        categorical_kl(torch.randn(2, 5), torch.randn(2, 6))
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 4\] .* of ref_logits"):
        categorical_kl(torch.randn(2, 5), torch.randn(2, 4), vocab_size=5)
    with pytest.raises(TypeError, match=r"response_mask must be bool \(True = the token counts\)"):
        categorical_kl(torch.randn(2, 5), torch.randn(2, 5), response_mask=torch.tensor([1, 0]))
