"""The clipped policy loss: values, gradients, metrics and edges."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import policy_loss
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WEIGHTS_MESSAGE = (
    "weights must be bool (True = the token counts) or floating-point "
    "(as token_weights returns), got torch.int64"
)
METRICS = ("clipfrac", "approx_kl", "ratio_mean", "ratio_var", "count")


def all_of(x):
    """A mask where everything counts."""
    return torch.ones_like(x, dtype=torch.bool)


def loss_at(ratio, advantage, impl, **options):
    """Loss and d loss/d logprob of one token."""
    logprobs = torch.tensor([ratio]).log().requires_grad_()
    advantages = torch.tensor([advantage])
    got = policy_loss(
        logprobs, torch.zeros(1), advantages, all_of(advantages), impl=impl, **options
    )
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    return got.loss.item(), grad.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "dual_clip", "loss", "grad"),
    [
        (-1.0, 10.0, None, 10.0, 10.0),  # verl#783: the paper's loss has no bound here
        (-1.0, 10.0, 3.0, 3.0, 0.0),
        (-1.0, 1.5, 3.0, 1.5, 1.5),
        (-1.0, 0.5, None, 0.8, 0.0),
        (-1.0, 1.5, None, 1.5, 1.5),
        (1.0, 1.5, None, -1.2, 0.0),  # rllm#81: the mean was over the unclipped term, −1.5
        (1.0, 0.5, None, -0.5, -0.5),
        (1.0, 1.1, None, -1.1, -1.1),
        (2.0, 1.0, 3.0, -2.0, -2.0),  # tianshou#433: dual clip is for negative advantages
        (0.0, 7.0, None, 0.0, 0.0),
    ],
)
def test_one_token_on_paper(impl, advantage, ratio, dual_clip, loss, grad):
    got = loss_at(ratio, advantage, impl, dual_clip=dual_clip)
    assert_close(got, (loss, grad), **CLOSE)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.25, 1.0, -1.25), (1.4, 1.0, -1.3), (0.5, -1.0, 0.8)]
)
def test_upper_clip_width_of_its_own(impl, ratio, advantage, loss):
    got, _ = loss_at(ratio, advantage, impl, cliprange=0.2, cliprange_high=0.3)
    assert_close(got, loss, **CLOSE)


def test_first_minibatch(impl):
    # ratio 1: the loss is −mean Â, its gradient −Â/n, and every metric says "no change"
    logprobs = (torch.randn(3, 5) - 2).requires_grad_()
    advantages = torch.randn(3, 5)
    got = policy_loss(logprobs, logprobs.detach(), advantages, all_of(advantages), impl=impl)
    assert_close(got.loss, -advantages.mean(), **CLOSE)
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert_close(grad, -advantages / 15, **CLOSE)
    assert [getattr(got, name).item() for name in METRICS] == [0, 0, 1, 0, 15]


def test_metrics_on_paper(impl):
    # ratios 2, 1/2, 1 under the mask; Â = 1 clips 2 only
    logprobs = torch.tensor([math.log(2), -math.log(2), 0.0, 50.0])
    mask = torch.tensor([True, True, True, False])
    got = policy_loss(logprobs, torch.zeros(4), torch.ones(4), mask, impl=impl)
    mean = 3.5 / 3
    want = {
        "clipfrac": 1 / 3,
        "approx_kl": ((1 - math.log(2)) + (-0.5 + math.log(2))) / 3,
        "ratio_mean": mean,
        "ratio_var": (4 + 0.25 + 1) / 3 - mean**2,
        "count": 3.0,
    }
    for name, number in want.items():
        assert_close(getattr(got, name).item(), number, rtol=1e-5, atol=1e-6)
    assert_close(got.loss.item(), -(1.2 + 0.5 + 1) / 3, rtol=1e-5, atol=1e-6)


def test_clipfrac_counts_where_the_clip_binds(impl):
    # ratio 1.5 with Â < 0 is outside the interval, but the unclipped branch is the larger
    logprobs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantages = torch.tensor([1.0, -1, 1, -1])
    got = policy_loss(logprobs, torch.zeros(4), advantages, all_of(advantages), impl=impl)
    assert got.clipfrac.item() == 0.5


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf, -1e10])
@pytest.mark.parametrize("as_float", [False, True])
def test_masked_places_have_no_effect(impl, rubbish, as_float):
    # OpenRLHF#1240, pytorch#4132
    logprobs = torch.tensor([0.0, rubbish]).requires_grad_()
    mask = torch.tensor([True, False])
    got = policy_loss(
        logprobs,
        torch.tensor([0.0, rubbish]),
        torch.tensor([1.0, rubbish]),
        mask.float() if as_float else mask,
        impl=impl,
    )
    assert got.loss.item() == -1
    assert [getattr(got, name).item() for name in METRICS] == [0, 0, 1, 0, 1]
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert grad.tolist() == [-1, 0]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_nan_where_a_token_counts_stays(impl, which, dual_clip):
    inputs = [torch.zeros(2), torch.zeros(2), -torch.ones(2)]
    inputs[which][1] = math.nan
    got = policy_loss(*inputs, all_of(inputs[0]), dual_clip=dual_clip, impl=impl)
    assert got.loss.isnan()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("as_float", [False, True])
def test_nothing_counts(impl, shape, as_float):
    # verl#782
    logprobs = torch.randn(shape, requires_grad=True)
    weights = torch.zeros(shape, dtype=torch.float32 if as_float else torch.bool)
    got = policy_loss(logprobs, torch.randn(shape), torch.randn(shape), weights, impl=impl)
    assert [x.item() for x in got] == [0] * 6
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert torch.equal(grad, torch.zeros(shape))


@pytest.mark.parametrize("log_ratio", [41.0, 88.0, 1e4])
def test_huge_ratio_is_finite_and_keeps_its_gradient(impl, log_ratio):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    got = policy_loss(
        logprobs, torch.zeros(1), torch.tensor([-1.0]), torch.tensor([True]), impl=impl
    )
    (grad,) = torch.autograd.grad(got.loss, logprobs)
    assert all(math.isfinite(x.item()) for x in got)
    assert_close(got.loss.item(), math.exp(40), rtol=1e-5, atol=0.0)
    assert_close(grad.item(), math.exp(40), rtol=1e-5, atol=0.0)


def test_token_that_became_impossible(impl):
    got = policy_loss(
        torch.tensor([-math.inf, 0.0]), torch.zeros(2), torch.ones(2), torch.ones(2), impl=impl
    )
    assert got.loss.item() == -1
    assert got.ratio_mean.item() == 0.5


@pytest.mark.parametrize("log_ratio", [1e-3, 1e-4, -1e-4])
def test_approx_kl_does_not_cancel(impl, log_ratio):
    logprobs = torch.tensor([log_ratio])
    x = logprobs.double().item()
    exact = sum(x**n / math.factorial(n) for n in range(2, 20))
    got = policy_loss(logprobs, torch.zeros(1), torch.ones(1), torch.ones(1), impl=impl)
    assert_close(got.approx_kl.item(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_within_budget(impl, dual_clip, dtype):
    shape = (7, 300)
    inputs = [(torch.randn(shape) * s).to(dtype) for s in (0.3, 0.3, 1.0)]
    weights = torch.rand(shape) * (torch.rand(shape) < 0.7) / 1000

    def run(impl, to):
        logprobs, *others = (x.to(to) for x in inputs)
        logprobs.requires_grad_()
        got = policy_loss(logprobs, *others, weights, dual_clip=dual_clip, impl=impl)
        return *got, torch.autograd.grad(got.loss, logprobs)[0]

    results = run(impl, dtype), run("reference", torch.float64), run("reference", dtype)
    for got, truth, own in zip(*results, strict=True):
        assert_within_error_budget(got, truth, own)
    assert results[0][0].dtype == torch.float32


def test_gradcheck_of_the_reference():
    logprobs = (torch.randn(40, dtype=torch.float64) * 0.4).requires_grad_()
    old, advantages = torch.zeros(40), torch.randn(40)
    weights = torch.rand(40, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, weights, dual_clip=1.5, impl="reference").loss,
        logprobs,
    )


def test_only_logprobs_get_a_gradient_and_metrics_have_none(impl):
    inputs = torch.randn(3, 2, 4).requires_grad_().unbind()
    got = policy_loss(*inputs, torch.rand(2, 4).requires_grad_(), impl=impl)
    assert got.loss.requires_grad
    assert not any(x.requires_grad for x in got[1:])
    constants = [torch.randn(2, 4).requires_grad_() for _ in range(3)]
    got = policy_loss(torch.randn(2, 4), *constants, impl=impl)
    assert not got.loss.requires_grad


def test_upstream_gradient_scales(impl):
    logprobs, advantages = torch.zeros(3, requires_grad=True), torch.tensor([1.0, -2, 3])
    loss = policy_loss(logprobs, torch.zeros(3), advantages, torch.ones(3), impl=impl).loss
    (3 * loss).backward()
    assert_close(logprobs.grad, -3 * advantages, **CLOSE)


def test_any_strides_and_same_bits(impl):
    inputs = torch.randn(3, 30, 8).mT.unbind()
    weights = torch.rand(30, 8).T
    first = policy_loss(*inputs, weights, impl=impl)
    again = policy_loss(*inputs, weights, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    contiguous = policy_loss(*(x.contiguous() for x in inputs), weights.contiguous(), impl=impl)
    assert_close(tuple(first), tuple(contiguous), **CLOSE)


def test_compiles_without_graph_breaks(impl):
    def run(logprobs, old, advantages, mask):
        return policy_loss(logprobs, old, advantages, mask, dual_clip=3.0, impl=impl).loss

    logprobs = torch.randn(3, 9, requires_grad=True)
    others = (*torch.randn(2, 3, 9), torch.rand(3, 9) < 0.7)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(logprobs, *others), logprobs)
    (want,) = torch.autograd.grad(run(logprobs, *others), logprobs)
    assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cliprange": 0.0}, ValueError, "cliprange must be in (0, 1), got 0.0"),
        ({"cliprange": 1.0}, ValueError, "cliprange must be in (0, 1), got 1.0"),
        (
            {"cliprange_high": 0.0},
            ValueError,
            "cliprange_high must be positive and finite, got 0.0",
        ),
        (
            {"dual_clip": 1.0},
            ValueError,
            "dual_clip must be greater than 1 and finite, got 1.0",
        ),
        (
            {"dual_clip": 0.5},
            ValueError,
            "dual_clip must be greater than 1 and finite, got 0.5",
        ),
        (
            {"weights": torch.ones(2, dtype=torch.int64)},
            TypeError,
            WEIGHTS_MESSAGE,
        ),
        (
            {"weights": torch.ones(2, 1)},
            ValueError,
            "weights must have shape [2] (as logprobs), got [2, 1]",
        ),
    ],
)
def test_refusals(change, error, message):
    names = ("logprobs", "old_logprobs", "advantages", "weights")
    arguments = {name: torch.ones(2) for name in names} | change
    with pytest.raises(error) as caught:
        policy_loss(**arguments)
    assert str(caught.value) == message
