"""From scores to advantages in one call."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import gae, masked_moments, ppo_advantages, token_rewards
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def batch(b=6, t=50):
    """scores, logprobs, ref_logprobs, values, response_mask with holes and an empty row."""
    mask = torch.rand(b, t) < 0.7
    mask[:, t // 2 :] &= torch.arange(b)[:, None] % 2 == 0
    if b > 1:
        mask[1] = False
    return torch.randn(b), *torch.randn(3, b, t), mask


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_is_the_three_operators_at_once(impl, estimator, bootstrap):
    scores, logprobs, ref_logprobs, values, mask = batch()
    scan = {"gamma": 0.98, "gae_lambda": 0.9}
    scan["bootstrap_values"] = torch.randn(6) if bootstrap else None
    options = {"kl_coef": 0.2, "estimator": estimator, "impl": impl}
    got = ppo_advantages(scores, logprobs, ref_logprobs, values, mask, **options, **scan)
    rewards = token_rewards(scores, logprobs, ref_logprobs, mask, **options)
    advantages, returns = gae(rewards, values, mask, impl=impl, **scan)
    assert_close(got.advantages, advantages, **CLOSE)
    assert_close(got.returns, returns, **CLOSE)
    assert_close(got.moments, masked_moments(advantages, mask, impl=impl), rtol=1e-4, atol=1e-4)


def test_on_paper(impl):
    # trl#3750 with a penalty of 0.1 on the first token: 1.805 − 0.1
    mask = torch.tensor([[True, True, True, False]])
    logprobs, zero = torch.tensor([[1.0, 0, 0, math.nan]]), torch.zeros(1, 4)
    got = ppo_advantages(torch.tensor([2.0]), logprobs, zero, zero, mask, kl_coef=0.1, impl=impl)
    want = torch.tensor([[1.705, 1.9, 2.0, 0]])
    assert_close(got.advantages, want, **CLOSE)
    assert_close(got.returns, want, **CLOSE)
    mean = (1.705 + 1.9 + 2) / 3
    m2 = sum((x - mean) ** 2 for x in (1.705, 1.9, 2.0))
    assert_close(got.moments, torch.tensor([3, mean, m2]), **CLOSE)


def test_within_budget(impl):
    inputs = batch(8, 130)

    def run(impl, dtype):
        floats = [x.to(dtype) for x in inputs[:4]]
        return ppo_advantages(*floats, inputs[4], kl_coef=0.05, impl=impl)

    truth, own = run("reference", torch.float64), run("reference", torch.float32)
    got = run(impl, torch.float32)
    for g, t, o in zip(got[:2], truth[:2], own[:2], strict=True):
        assert_within_error_budget(g, t, o)
    tinies = (0.0, 2.4e-7 * truth.advantages.abs().max().item(), None)
    for g, t, o, tiny in zip(got.moments, truth.moments, own.moments, tinies, strict=True):
        assert_within_error_budget(g, t, o, tiny=tiny)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_places_have_no_effect(impl, rubbish):
    scores, *rest, mask = batch()
    dirty = [torch.where(mask, x, rubbish) for x in rest]
    dirty_scores = torch.where(mask.any(1), scores, rubbish)
    got = ppo_advantages(dirty_scores, *dirty, mask, kl_coef=0.1, impl=impl)
    want = ppo_advantages(scores, *rest, mask, kl_coef=0.1, impl=impl)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert (got.advantages[~mask] == 0).all()
    assert (got.returns[~mask] == 0).all()


@pytest.mark.parametrize(("b", "t"), [(0, 5), (5, 0)])
def test_empty(impl, b, t):
    x, mask = torch.randn(b, t), torch.ones(b, t, dtype=torch.bool)
    got = ppo_advantages(torch.randn(b), x, x, x, mask, kl_coef=0.1, impl=impl)
    assert got.advantages.shape == got.returns.shape == (b, t)
    assert torch.equal(got.moments, torch.zeros(3))


def test_no_gradient(impl):
    *floats, mask = batch()
    got = ppo_advantages(*(x.requires_grad_() for x in floats), mask, kl_coef=0.1, impl=impl)
    assert not any(x.requires_grad for x in got)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": 2.0}, ValueError, "gamma must be in [0, 1], got 2.0"),
        ({"kl_coef": math.inf}, ValueError, "kl_coef must be finite, got inf"),
        (
            {"values": torch.zeros(2, 4)},
            ValueError,
            "values must have shape [2, 3] (as logprobs), got [2, 4]",
        ),
        (
            {"scores": torch.zeros(3)},
            ValueError,
            "scores must have shape [2] (the batch of logprobs), got [3]",
        ),
        (
            {"response_mask": torch.zeros(2, 3)},
            TypeError,
            "response_mask must be bool (True = the token counts), got torch.float32",
        ),
    ],
)
def test_refusals(change, error, message):
    names = ("logprobs", "ref_logprobs", "values")
    arguments = {name: torch.zeros(2, 3) for name in names}
    arguments |= {"scores": torch.zeros(2), "kl_coef": 0.1}
    arguments |= {"response_mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(error) as caught:
        ppo_advantages(**(arguments | change))
    assert str(caught.value) == message
