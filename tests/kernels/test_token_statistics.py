"""The four numbers per token in one read."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import (
    categorical_kl,
    token_logprobs,
    token_logprobs_and_entropy,
    token_statistics,
)
from ppo_kernels.testing import assert_within_error_budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_four_operators_at_once(impl, dtype):
    logits, ref_logits = (torch.randn(2, 4, 6, 37) * 3).to(dtype)
    tokens = torch.randint(31, (4, 6))
    tokens[1, 2] = -100
    options = {
        "temperature": 0.7,
        "vocab_size": 31,
        "response_mask": torch.rand(4, 6) < 0.7,
        "impl": impl,
    }
    got = token_statistics(logits, ref_logits, tokens, **options)
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, **options)
    assert_close(got.logprobs, logprobs, rtol=0, atol=1e-6)
    assert_close(got.entropy, entropy, rtol=0, atol=1e-6)
    ref_logprobs = token_logprobs(ref_logits, tokens, **options)
    assert_close(got.ref_logprobs, ref_logprobs, rtol=0, atol=2e-6)
    options["response_mask"] = options["response_mask"] & (tokens != -100)
    assert_close(got.kl, categorical_kl(logits, ref_logits, **options), rtol=0, atol=2e-6)


@pytest.mark.parametrize("used", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 1)])
def test_gradients_within_budget(impl, used):
    logits, ref_logits = torch.randn(2, 40, 65) * 2
    tokens, mask = torch.randint(65, (40,)), torch.rand(40) < 0.8

    def run(z, z_ref, impl):
        z = z.clone().requires_grad_()
        got = token_statistics(z, z_ref, tokens, temperature=1.4, response_mask=mask, impl=impl)
        loss = sum(w * x.sum() for w, x in zip(used, got[:3], strict=True) if w)
        return torch.autograd.grad(loss, z)[0]

    truth = run(logits.double(), ref_logits.double(), "reference")
    own = run(logits, ref_logits, "reference")
    assert_within_error_budget(run(logits, ref_logits, impl), truth, own)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradcheck(impl):
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ref_logits, tokens = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, -100, 4])
    torch.autograd.gradcheck(
        lambda z: token_statistics(z, ref_logits, tokens, impl=impl)[:3], logits
    )


def test_gradients_of_the_torch_version_add_up():
    # One backward pass through all outputs is the sum of one through each.
    logits, ref_logits = torch.randn(2, 4, 9)
    logits.requires_grad_()
    tokens = torch.randint(9, (4,))
    logprobs, entropy, kl, _ = token_statistics(logits, ref_logits, tokens, impl="torch")
    each = [
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (logprobs, entropy, kl)
    ]
    (together,) = torch.autograd.grad((logprobs + entropy + kl).sum(), logits)
    assert_close(together, each[0] + each[1] + each[2], rtol=0, atol=1e-6)


def test_reference_logprobs_have_no_gradient(impl):
    logits, ref_logits = torch.randn(2, 4, 9).requires_grad_().unbind()
    got = token_statistics(logits, ref_logits, torch.randint(9, (4,)), impl=impl)
    assert got.kl.requires_grad
    assert not got.ref_logprobs.requires_grad


def test_banned_columns(impl):
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    got = token_statistics(logits, logits.clone(), torch.tensor([2]), impl=impl)
    assert got.logprobs.item() == got.ref_logprobs.item() == -math.inf
    assert_close(got.entropy, torch.tensor([math.log(2)]), rtol=0, atol=1e-6)
    assert_close(got.kl, torch.tensor([0.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_rows_are_zero_everywhere(impl, rubbish):
    logits = torch.full((2, 3, 5), rubbish).requires_grad_()
    mask = torch.zeros(2, 3, dtype=torch.bool)
    tokens = torch.full((2, 3), 77)
    got = token_statistics(logits, logits.detach(), tokens, response_mask=mask, impl=impl)
    assert all(torch.equal(x.detach(), torch.zeros(2, 3)) for x in got)
    (grad,) = torch.autograd.grad(got.logprobs.sum() + got.kl.sum(), logits)
    assert torch.equal(grad, torch.zeros(2, 3, 5))


def test_token_out_of_range_is_nan_where_nobody_may_look(impl):
    compiled = torch.compile(token_statistics, fullgraph=True, backend="eager")
    got = compiled(torch.randn(2, 5), torch.randn(2, 5), torch.tensor([9, 1]), impl=impl)
    assert all(x.isnan().tolist() == [True, False] for x in got)


def test_empty(impl):
    empty = torch.randn(0, 4, 5)
    got = token_statistics(empty, empty, torch.zeros(0, 4, dtype=torch.int64), impl=impl)
    assert all(x.shape == (0, 4) for x in got)


def test_refusal_names_the_reference():
    with pytest.raises(TypeError, match="ref_logits must be a floating-point tensor"):
        token_statistics(torch.randn(1, 5), torch.ones(1, 5, dtype=torch.int64), torch.tensor([0]))
