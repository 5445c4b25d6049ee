"""KL estimators over sampled tokens."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import kl_penalty
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ESTIMATORS = ["k1", "abs", "k2", "k3"]


def penalty_and_grads(logprobs, ref_logprobs, estimator, impl, **options):
    """The penalty and the gradients of its sum to both arguments."""
    logprobs = torch.as_tensor(logprobs).detach().requires_grad_()
    ref_logprobs = torch.as_tensor(ref_logprobs).detach().requires_grad_()
    kl = kl_penalty(logprobs, ref_logprobs, estimator=estimator, impl=impl, **options)
    return kl.detach(), *torch.autograd.grad(kl.sum(), (logprobs, ref_logprobs))


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [-0.5, 0.5], [1.0, 1.0]),
        ("abs", [0.5, 0.5], [-1.0, 1.0]),
        ("k2", [0.125, 0.125], [-0.5, 0.5]),
        ("k3", [0.148721271, 0.10653066], [-0.648721271, 0.39346934]),
    ],
)
def test_half_a_nat_on_paper(impl, estimator, values, slopes):
    # k3(−½) = √e − 1 − ½, with slope 1 − √e; OpenRLHF#1335
    kl, grad, ref_grad = penalty_and_grads([-1.5, -1.0], [-1.0, -1.5], estimator, impl)
    assert_close(kl, torch.tensor(values), **CLOSE)
    assert_close(grad, torch.tensor(slopes), **CLOSE)
    assert_close(ref_grad, -torch.tensor(slopes), **CLOSE)


def test_sign(impl):
    # optimate#298: a policy that is surer than the reference has a positive penalty
    kl = kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), impl=impl)
    assert kl.item() == 1.0


def test_mean_of_each_estimator(impl):
    # trl#1161
    delta, zero = torch.tensor([-0.3, 0.1]), torch.zeros(2)
    means = [kl_penalty(delta, zero, estimator=e, impl=impl).mean() for e in ESTIMATORS[:3]]
    assert_close(torch.stack(means), torch.tensor([-0.1, 0.2, 0.025]), **CLOSE)


@pytest.mark.parametrize("delta", [1e-3, 1e-4, 1e-5, -1e-4, 0.3, -0.49, 0.51])
def test_k3_does_not_cancel_near_zero(impl, delta):
    x = torch.tensor([delta])
    d = x.double().item()
    exact = sum((-d) ** n / math.factorial(n) for n in range(2, 20))
    kl, grad, _ = penalty_and_grads(x, torch.zeros(1), "k3", impl)
    assert_close(kl.item(), exact, rtol=1e-6, atol=0.0)
    assert_close(grad.item(), -math.expm1(-d), rtol=1e-6, atol=0.0)
    assert kl.item() >= 0


@pytest.mark.parametrize("gap", [100.0, 1e4, 1e10])
def test_k3_far_below_the_reference_is_finite_with_a_gradient(impl, gap):
    # OpenRLHF#1335: a clamp of the value made the gradient 0 · inf
    kl, grad, ref_grad = penalty_and_grads([-gap], [0.0], "k3", impl)
    assert math.isfinite(kl.item())
    assert kl.item() > 1e37
    assert_close(grad.item(), 1 - math.exp(88), rtol=1e-5, atol=0.0)
    assert ref_grad.item() == -grad.item()


def test_k3_far_above_the_reference_is_linear(impl):
    kl, grad, _ = penalty_and_grads([1e5], [0.0], "k3", impl)
    assert_close(kl.item(), 1e5 - 1, rtol=1e-6, atol=0.0)
    assert grad.item() == 1


def test_k2_at_the_limit_of_float32(impl):
    kl, grad, _ = penalty_and_grads([-3e38, 4.0], [0.0, 0.0], "k2", impl)
    assert_close(kl, torch.tensor([0.5 * 1.8e19**2, 8.0]), **CLOSE)
    assert_close(grad, torch.tensor([-1.8e19, 4.0]), **CLOSE)


def test_gradient_of_abs_at_zero_is_zero(impl):
    _, grad, _ = penalty_and_grads([0.7], [0.7], "abs", impl)
    assert grad.item() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, -1e10])
def test_masked_places_have_no_effect(impl, estimator, rubbish):
    # ms-swift#9767
    mask = torch.tensor([True, False])
    kl, grad, ref_grad = penalty_and_grads(
        [-1.0, rubbish], [-1.5, 0.0], estimator, impl, response_mask=mask
    )
    want, want_grad, want_ref = penalty_and_grads([-1.0], [-1.5], estimator, impl)
    for got, alone in ((kl, want), (grad, want_grad), (ref_grad, want_ref)):
        assert_close(got, torch.cat([alone, torch.zeros(1)]), rtol=0, atol=1e-7)


def test_masked_k3_mean(impl):
    kl = kl_penalty(
        torch.tensor([-1.0, -1e10]),
        torch.tensor([-1.5, 0.0]),
        estimator="k3",
        response_mask=torch.tensor([True, False]),
        impl=impl,
    )
    assert_close(kl.sum(), torch.tensor(0.10653066), **CLOSE)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_within_budget(impl, estimator, dtype):
    logprobs, ref_logprobs = (torch.randn(2, 6, 50) * 2 - 3).to(dtype)
    got = penalty_and_grads(logprobs, ref_logprobs, estimator, impl)
    truth = penalty_and_grads(logprobs.double(), ref_logprobs.double(), estimator, "reference")
    own = penalty_and_grads(logprobs, ref_logprobs, estimator, "reference")
    assert got[0].dtype == torch.float32
    for g, t, o in zip(got, truth, own, strict=True):
        assert_within_error_budget(g, t, o)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck_of_the_reference(estimator):
    logprobs = torch.tensor([-3.0, -0.2, 0.4, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda a, b: kl_penalty(a, b, estimator=estimator, impl="reference"),
        (logprobs, ref_logprobs),
    )


def test_k1_and_k3_are_unbiased(impl):
    # E_p[k1] = E_p[k3] = KL, summed over all outcomes rather than sampled
    log_p, log_q = torch.randn(2, 30).log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    for estimator in ("k1", "k3"):
        kl = kl_penalty(log_p, log_q, estimator=estimator, impl=impl)
        assert_close((log_p.exp() * kl).sum(), exact, rtol=1e-5, atol=1e-5)


def test_nan_where_a_token_counts_stays(impl):
    for estimator in ESTIMATORS:
        kl = kl_penalty(
            torch.tensor([math.nan, 0.0]), torch.zeros(2), estimator=estimator, impl=impl
        )
        assert kl.isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (), (2, 3, 4)])
def test_any_shape(impl, shape):
    a = torch.randn(shape)
    assert_close(kl_penalty(a, torch.zeros(shape), impl=impl), a, **CLOSE)


def test_any_strides(impl):
    a, b = torch.randn(2, 6, 8)[:, ::2].unbind()
    got = kl_penalty(a.T, b.T.contiguous(), estimator="k3", impl=impl)
    want = kl_penalty(a, b, estimator="k3", impl=impl).T
    assert_close(got, want, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"estimator": "k4"},
            ValueError,
            "estimator must be 'k1', 'abs', 'k2' or 'k3', got 'k4'",
        ),
        (
            {"ref_logprobs": torch.zeros(3)},
            ValueError,
            "ref_logprobs must have shape [2] (as logprobs), got [3]",
        ),
        (
            {"response_mask": torch.ones(2)},
            TypeError,
            "response_mask must be bool (True = the token counts), got torch.float32",
        ),
        (
            {"logprobs": torch.zeros(2, dtype=torch.int64)},
            TypeError,
            "logprobs must be a floating-point tensor, got torch.int64",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {"logprobs": torch.zeros(2), "ref_logprobs": torch.zeros(2)} | change
    with pytest.raises(error) as caught:
        kl_penalty(**arguments)
    assert str(caught.value) == message
