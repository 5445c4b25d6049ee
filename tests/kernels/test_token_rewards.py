"""Rewards per token from scores and a KL penalty."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import gae, token_rewards
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def mask_of(*rows):
    """A mask from strings: x counts."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def test_penalty_and_score_on_paper(impl):
    # optimate#298: logp −1 against −2 at β = 0.1 costs 0.1
    mask = mask_of("xxx..")
    logprobs = torch.tensor([[-1.0, -2, -3, -9, -9]])
    ref_logprobs = torch.tensor([[-2.0, -2, -2.5, -1, -1]])
    got = token_rewards(torch.tensor([2.0]), logprobs, ref_logprobs, mask, kl_coef=0.1, impl=impl)
    assert_close(got, torch.tensor([[-0.1, 0.0, 2.05, 0, 0]]), **CLOSE)


def test_score_on_the_last_token_that_counts(impl):
    # trl#3750: one step late, the advantages start at 1.71475
    mask = mask_of("xxx..", "xxxxx", "x.x..", "....x", ".....")
    zero = torch.zeros(5, 5)
    scores = torch.tensor([2.0, 3, 4, 5, 6])
    got = token_rewards(scores, zero, zero, mask, kl_coef=0.1, impl=impl)
    want = torch.zeros(5, 5)
    want[0, 2], want[1, 4], want[2, 2], want[3, 4] = 2, 3, 4, 5
    assert torch.equal(got, want)
    advantages, _ = gae(got[:1], zero[:1], mask[:1], impl=impl)
    assert_close(advantages, torch.tensor([[1.805, 1.9, 2, 0, 0]]), **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_rubbish_where_nothing_counts(impl, estimator):
    mask = mask_of("x.x", "...")
    clean = torch.randn(2, 3)
    got = []
    for rubbish in (0.0, math.nan, math.inf, -math.inf):
        dirty = torch.where(mask, clean, rubbish)
        scores = torch.tensor([1.0, rubbish])
        got.append(
            token_rewards(
                scores, dirty, dirty * 0.5, mask, kl_coef=0.2, estimator=estimator, impl=impl
            )
        )
    assert all(torch.equal(x, got[0]) for x in got)
    assert (got[0][~mask] == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_budget(impl, estimator, dtype):
    logprobs, ref_logprobs = (torch.randn(2, 5, 33) - 2).to(dtype)
    scores, mask = torch.randn(5).to(dtype), torch.rand(5, 33) < 0.8

    def run(impl, to):
        return token_rewards(
            scores.to(to),
            logprobs.to(to),
            ref_logprobs.to(to),
            mask,
            kl_coef=0.05,
            estimator=estimator,
            impl=impl,
        )

    got = run(impl, dtype)
    assert got.dtype == torch.float32
    assert_within_error_budget(got, run("reference", torch.float64), run("reference", dtype))


def test_sum_of_rewards_is_score_minus_total_penalty(impl):
    logprobs, ref_logprobs = torch.randn(2, 4, 9)
    scores, mask = torch.randn(4), torch.rand(4, 9) < 0.6
    mask[:, 0] = True
    got = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=0.3, impl=impl)
    total = torch.where(mask, logprobs - ref_logprobs, 0).sum(1)
    assert_close(got.sum(1), scores - 0.3 * total, rtol=1e-5, atol=1e-5)


def test_zero_coefficient_leaves_the_score(impl):
    mask = mask_of("xx.")
    got = token_rewards(
        torch.tensor([1.5]), torch.randn(1, 3), torch.randn(1, 3), mask, kl_coef=0.0, impl=impl
    )
    assert torch.equal(got, torch.tensor([[0.0, 1.5, 0.0]]))


def test_no_gradient(impl):
    inputs = [torch.randn(2).requires_grad_(), *torch.randn(2, 2, 3).requires_grad_()]
    got = token_rewards(*inputs, mask_of("xxx", "xx."), kl_coef=0.1, impl=impl)
    assert not got.requires_grad


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_empty(impl, shape):
    empty = torch.randn(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    got = token_rewards(torch.randn(shape[0]), empty, empty, mask, kl_coef=0.1, impl=impl)
    assert got.shape == shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"scores": torch.zeros(2, 1)},
            ValueError,
            "scores must have shape [2] (the batch of logprobs), got [2, 1]",
        ),
        ({"kl_coef": math.nan}, ValueError, "kl_coef must be finite, got nan"),
        (
            {"response_mask": torch.ones(2, 3, dtype=torch.int64)},
            TypeError,
            "response_mask must be bool (True = the token counts), got torch.int64",
        ),
        (
            {"estimator": "kl"},
            ValueError,
            "estimator must be 'k1', 'abs', 'k2' or 'k3', got 'kl'",
        ),
        (
            {"ref_logprobs": torch.zeros(2, 4)},
            ValueError,
            "ref_logprobs must have shape [2, 3] (as logprobs), got [2, 4]",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {
        "scores": torch.zeros(2),
        "logprobs": torch.zeros(2, 3),
        "ref_logprobs": torch.zeros(2, 3),
        "response_mask": mask_of("xxx", "xxx"),
        "kl_coef": 0.1,
    } | change
    with pytest.raises(error) as caught:
        token_rewards(**arguments)
    assert str(caught.value) == message
