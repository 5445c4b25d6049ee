"""Weights that make micro-batches and ranks add up."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import policy_loss, token_weights, value_loss

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
MASK = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token-mean", 1 / 4, 1 / 4),
        ("seq-mean-token-mean", 1 / 2, 1 / 6),
        ("seq-mean-token-sum", 1 / 2, 1 / 2),
    ],
)
def test_two_rows_and_an_empty_one(mode, first, second):
    want = torch.tensor([[first, 0, 0], [second] * 3, [0, 0, 0]])
    assert_close(token_weights(MASK, mode), want)


@pytest.mark.parametrize(("mode", "want"), list(zip(MODES, [1.5, 2.0, 3.0], strict=True)))
def test_what_the_modes_mean(mode, want):
    # verl#5625: rows with losses [3] and [1, 1, 1]
    losses = torch.tensor([[3.0, 9, 9], [1, 1, 1], [9, 9, 9]])
    assert_close((token_weights(MASK, mode) * losses).sum(), torch.tensor(want))


@pytest.mark.parametrize(("mode", "want"), list(zip(MODES, [2.0, 2.0, 4.0], strict=True)))
def test_nan_under_the_mask_in_every_mode(impl, mode, want):
    # verl#6349: losses [1, NaN, 3]; −Â·ρ with ρ = 1 is the loss
    weights = token_weights(torch.tensor([[True, False, True]]), mode)
    zero, advantages = torch.zeros(1, 3), torch.tensor([[-1.0, math.nan, -3.0]])
    got = policy_loss(zero, zero, advantages, weights, impl=impl)
    assert_close(got.loss, torch.tensor(want))


@pytest.mark.parametrize("mode", MODES[:2])
def test_weights_sum_to_one(mode):
    mask = torch.rand(13, 50) < 0.3
    assert_close(token_weights(mask, mode).sum(), torch.tensor(1.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cuts", [[1], [1, 2, 3, 4, 5], [0, 4]])
def test_micro_batches_add_up(impl, mode, cuts):
    logprobs = torch.randn(6, 9, requires_grad=True)
    old, advantages = torch.randn(2, 6, 9)
    mask = torch.arange(9) < torch.tensor([[1], [9], [5], [0], [3], [2]])
    counts = {"num_tokens": mask.sum(), "num_sequences": int(mask.any(1).sum())}

    def loss(part):
        weights = token_weights(mask[part], mode, **counts)
        policy = policy_loss(logprobs[part], old[part], advantages[part], weights, impl=impl)
        value = value_loss(logprobs[part], old[part], advantages[part], weights, impl=impl)
        return policy.loss + value.loss

    whole = loss(slice(None))
    parts = torch.stack([loss(part) for part in torch.arange(6).tensor_split(cuts)]).sum()
    assert_close(parts, whole, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(x, logprobs)[0] for x in (parts, whole)]
    assert_close(*grads, rtol=1e-6, atol=1e-6)


def test_accumulation_is_not_divided_twice(impl):
    # ms-swift#10117: 4 micro-batches of 5 tokens with a loss of 2 each
    mask, zero = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5)
    weights = token_weights(mask, num_tokens=20)
    loss = policy_loss(zero, zero, zero - 2, weights, impl=impl).loss
    assert_close(4 * loss, torch.tensor(2.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3, 0)])
def test_nothing_counts(mode, shape):
    got = token_weights(torch.zeros(shape, dtype=torch.bool), mode)
    assert torch.equal(got, torch.zeros(shape))
    assert got.dtype == torch.float32


def test_refusals():
    with pytest.raises(ValueError, match="mode must be 'token-mean', 'seq-mean-token-mean' or"):
        token_weights(MASK, "mean")
    with pytest.raises(TypeError, match=r"response_mask must be bool .* got torch\.int64"):
        token_weights(MASK.long())
    with pytest.raises(ValueError, match=r"response_mask must have shape \[B, T\], got \[3\]"):
        token_weights(MASK[0])
