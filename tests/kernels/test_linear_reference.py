"""The specification of the operators that start from hidden states."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import reference

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def head(n=5, d=4, v=7, dtype=torch.float32):
    """hidden, weight, bias, tokens."""
    return (
        torch.randn(n, d, dtype=dtype),
        torch.randn(v, d, dtype=dtype),
        torch.randn(v, dtype=dtype),
        torch.randint(v, (n,)),
    )


def test_scale_then_cap_then_temperature():
    # h·w = 6, ·10 = 60, capped at 30·tanh(2) = 28.92 (unsloth-zoo#593), over τ = 2
    hidden, weight = torch.tensor([[2.0]]), torch.tensor([[3.0], [0.0]])
    got = reference.linear_token_logprobs(
        hidden,
        weight,
        torch.tensor([1]),
        logit_scale=10.0,
        logit_softcap=30.0,
        temperature=2.0,
    )
    z = 30 * math.tanh(2) / 2
    assert_close(got.item(), -z - math.log1p(math.exp(-z)), **CLOSE)


def test_is_the_logits_operator_after_the_head():
    hidden, weight, bias, tokens = head()
    got = reference.linear_token_logprobs_and_entropy(
        hidden, weight, tokens, bias=bias, temperature=0.7
    )
    p = torch.distributions.Categorical(logits=(hidden @ weight.T + bias) / 0.7)
    assert_close(got[0], p.log_prob(tokens), **CLOSE)
    assert_close(got[1], p.entropy(), **CLOSE)
    alone = reference.linear_token_logprobs(hidden, weight, tokens, bias=bias, temperature=0.7)
    assert torch.equal(alone, got[0])


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_hidden_states_reach_no_gradient(rubbish):
    hidden, weight, bias, tokens = head()
    mask = torch.tensor([True, False, True, True, True])
    tokens[3] = -100
    counted = mask & (tokens != -100)
    dirty = torch.where(counted[:, None], hidden, rubbish)
    leaves = [x.requires_grad_() for x in (dirty, weight, bias)]
    got = reference.linear_token_logprobs(dirty, weight, tokens, bias=bias, response_mask=mask)
    grads = torch.autograd.grad(got.sum(), leaves)
    want = reference.linear_token_logprobs(hidden[counted], weight, tokens[counted], bias=bias)
    assert_close(got[counted], want, **CLOSE)
    assert (got[~counted] == 0).all()
    assert_close(grads[1:], torch.autograd.grad(want.sum(), leaves[1:]), **CLOSE)
    assert (grads[0][~counted] == 0).all()


def test_kl_of_two_heads():
    hidden, weight, bias, _ = head()
    ref_hidden, ref_weight, ref_bias, _ = head()
    got = reference.linear_categorical_kl(
        hidden, weight, ref_hidden, ref_weight, bias=bias, ref_bias=ref_bias
    )
    p, q = (
        torch.distributions.Categorical(logits=h @ w.T + b)
        for h, w, b in ((hidden, weight, bias), (ref_hidden, ref_weight, ref_bias))
    )
    assert_close(got, torch.distributions.kl_divergence(p, q), **CLOSE)


def test_first_update_from_hidden_states():
    # ratio 1: loss −mean Â − c·mean H
    hidden, weight, bias, tokens = head()
    old, entropy = reference.linear_token_logprobs_and_entropy(hidden, weight, tokens, bias=bias)
    advantages, mask = torch.randn(5), torch.tensor([True, True, False, True, True])
    got = reference.linear_ppo_loss(
        hidden, weight, tokens, old, advantages, mask, bias=bias, entropy_coef=0.1
    )
    assert_close(got.loss, -advantages[mask].mean() - 0.1 * entropy[mask].mean(), **CLOSE)
    assert_close(got.policy.loss, -advantages[mask].mean(), **CLOSE)
    assert_close(got.entropy, entropy[mask].mean(), **CLOSE)
    assert (got.policy.ratio_mean.item(), got.policy.count.item()) == (1, 4)


@pytest.mark.parametrize("as_float", [False, True])
def test_ignored_tokens_leave_the_loss(as_float):
    hidden, weight, _, tokens = head()
    tokens[0] = -100
    hidden[0] = math.nan
    mask = torch.ones(5, dtype=torch.bool)
    weights = mask / 4 if as_float else mask
    got = reference.linear_ppo_loss(
        hidden, weight, tokens, torch.zeros(5), torch.ones(5), weights, entropy_coef=0.1
    )
    want = reference.linear_ppo_loss(
        hidden[1:], weight, tokens[1:], torch.zeros(4), torch.ones(4), mask[1:], entropy_coef=0.1
    )
    assert_close(got.loss, want.loss, **CLOSE)
    assert got.policy.count.item() == 4


def test_gradcheck():
    hidden, weight, bias, tokens = head(dtype=torch.float64)
    old, advantages = torch.randn(5) - 2, torch.randn(5)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def loss(hidden, weight, bias):
        return reference.linear_ppo_loss(
            hidden,
            weight,
            tokens,
            old,
            advantages,
            torch.ones(5),
            bias=bias,
            logit_softcap=5.0,
            entropy_coef=0.1,
        ).loss

    torch.autograd.gradcheck(loss, leaves)
