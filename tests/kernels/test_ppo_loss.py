"""Policy loss and value loss in one."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import policy_loss, ppo_loss, value_loss

OPTIONS = {"cliprange": 0.1, "cliprange_high": 0.3, "dual_clip": 2.5}


def six(shape=(3, 20)):
    """logprobs, old_logprobs, advantages, values, old_values, returns."""
    return [torch.randn(shape) * s for s in (0.4, 0.4, 1.0, 1.0, 1.0, 1.0)]


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("cliprange_value", [0.2, None])
def test_is_the_two_losses_at_once(impl, as_float, cliprange_value):
    inputs, mask = six(), torch.rand(3, 20) < 0.7
    weights = torch.rand(3, 20) * mask if as_float else mask
    inputs[0].requires_grad_()
    inputs[3].requires_grad_()
    got = ppo_loss(
        *inputs, weights, cliprange_value=cliprange_value, vf_coef=0.3, impl=impl, **OPTIONS
    )
    policy = policy_loss(*inputs[:3], weights, impl=impl, **OPTIONS)
    value = value_loss(*inputs[3:], weights, cliprange_value=cliprange_value, impl=impl)
    assert_close(tuple(got.policy), tuple(x.detach() for x in policy), rtol=1e-5, atol=1e-6)
    assert_close(tuple(got.value), tuple(x.detach() for x in value), rtol=1e-5, atol=1e-6)
    both = policy.loss + 0.3 * value.loss
    assert_close(got.loss, both, rtol=1e-5, atol=1e-6)
    leaves = (inputs[0], inputs[3])
    grads = torch.autograd.grad(3 * got.loss, leaves)
    assert_close(grads, torch.autograd.grad(3 * both, leaves), rtol=1e-5, atol=1e-6)


def test_one_token_on_paper(impl):
    # policy: −1.2 (ratio 1.5 clipped); value: ½·1.8² (clipped); 0.5 of that is 0.81
    inputs = [torch.tensor([x]) for x in (math.log(1.5), 0.0, 1.0, 1.0, 0.0, 2.0)]
    got = ppo_loss(*inputs, torch.tensor([True]), vf_coef=0.5, impl=impl)
    assert_close(got.loss, torch.tensor(-1.2 + 0.81), rtol=1e-5, atol=1e-6)
    assert (got.policy.clipfrac.item(), got.value.clipfrac.item()) == (1, 1)


def test_only_the_total_has_a_gradient(impl):
    inputs = [x.requires_grad_() for x in six()]
    got = ppo_loss(*inputs, torch.rand(3, 20), impl=impl)
    assert got.loss.requires_grad
    assert not any(x.requires_grad for x in (*got.policy, *got.value))
    grads = torch.autograd.grad(got.loss, inputs, allow_unused=True)
    assert [g is not None for g in grads] == [True, False, False, True, False, False]


def test_one_of_the_two_is_frozen(impl):
    inputs, mask = six(), torch.rand(3, 20) < 0.7
    inputs[3].requires_grad_()
    got = ppo_loss(*inputs, mask, vf_coef=2.0, impl=impl)
    (grad,) = torch.autograd.grad(got.loss, inputs[3])
    want = value_loss(*inputs[3:], mask, impl=impl)
    assert_close(grad, 2 * torch.autograd.grad(want.loss, inputs[3])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_places_have_no_effect(impl, rubbish):
    inputs, mask = six(), torch.rand(3, 20) < 0.7
    dirty = [torch.where(mask, x, rubbish).requires_grad_() for x in inputs]
    got = ppo_loss(*dirty, mask, impl=impl)
    want = ppo_loss(*inputs, mask, impl=impl)
    assert_close(got.loss, want.loss, rtol=0, atol=1e-7)
    assert tuple(got.policy) == tuple(want.policy)
    for grad in torch.autograd.grad(got.loss, (dirty[0], dirty[3])):
        assert grad.isfinite().all()
        assert (grad[~mask] == 0).all()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counts(impl, shape):
    inputs = six(shape)
    inputs[0].requires_grad_()
    got = ppo_loss(*inputs, torch.zeros(shape, dtype=torch.bool), impl=impl)
    assert [x.item() for x in (got.loss, *got.policy, *got.value)] == [0] * 10
    (grad,) = torch.autograd.grad(got.loss, inputs[0])
    assert torch.equal(grad, torch.zeros(shape))


def test_float64_in_float64_out():
    inputs = [x.double() for x in six()]
    for impl in ("reference", "torch"):
        got = ppo_loss(*inputs, torch.rand(3, 20) < 0.7, impl=impl)
        assert {x.dtype for x in (got.loss, *got.policy, *got.value)} == {torch.float64}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vf_coef": math.inf}, ValueError, "vf_coef must be finite, got inf"),
        ({"cliprange": 2.0}, ValueError, "cliprange must be in (0, 1), got 2.0"),
        (
            {"cliprange_value": -1.0},
            ValueError,
            "cliprange_value must be positive and finite, got -1.0",
        ),
        (
            {"returns": torch.ones(2, 1)},
            ValueError,
            "returns must have shape [2] (as logprobs), got [2, 1]",
        ),
    ],
)
def test_refusals(change, error, message):
    names = ["logprobs", "old_logprobs", "advantages", "values", "old_values", "returns", "weights"]
    arguments = {name: torch.ones(2) for name in names} | change
    with pytest.raises(error) as caught:
        ppo_loss(**arguments)
    assert str(caught.value) == message
