"""Entropy beside the log-probability, both with gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import token_logprobs, token_logprobs_and_entropy
from ppo_kernels.testing import assert_within_error_budget

INF = float("inf")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def entropy_and_grad(logits, impl, tokens=None, **options):
    """H and its gradient."""
    logits = logits.detach().requires_grad_()
    if tokens is None:
        tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    _, entropy = token_logprobs_and_entropy(logits, tokens, impl=impl, **options)
    (grad,) = torch.autograd.grad(entropy.sum(), logits)
    return entropy.detach(), grad


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([0.0, -INF], 0.0),
        ([0.0, 0.0, -INF], math.log(2)),
        ([65504.0, -65504.0], 0.0),
        ([-INF, 3.0, -INF, -INF, -INF], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_probability_zero_adds_nothing(impl, row, want, dtype):
    # trl#7221: 0 · −inf
    logits = torch.tensor([row], dtype=dtype)
    entropy, grad = entropy_and_grad(logits, impl)
    assert_close(entropy, torch.tensor([want]), **CLOSE)
    assert (entropy >= 0).all()
    assert_close(grad, torch.zeros_like(logits), rtol=0, atol=1e-6)


def test_two_columns_on_paper(impl):
    # p = [1/4, 3/4]: H = 1/4·ln 4 + 3/4·ln(4/3); dH/dx = −p·(ln p + H)
    entropy, grad = entropy_and_grad(torch.tensor([[0.0, math.log(3)]]), impl)
    h = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    want = [[-0.25 * (math.log(0.25) + h), -0.75 * (math.log(0.75) + h)]]
    assert_close(entropy, torch.tensor([h]), **CLOSE)
    assert_close(grad, torch.tensor(want), **CLOSE)


@pytest.mark.parametrize("columns", [1, 2, 33, 50257])
def test_flat_rows_have_the_entropy_of_their_width(impl, columns):
    entropy, grad = entropy_and_grad(torch.full((1, columns), -3.5), impl)
    assert_close(entropy, torch.tensor([math.log(columns)]), **CLOSE)
    assert_close(grad, torch.zeros(1, columns), rtol=0, atol=1e-6)


def test_entropy_is_minus_the_mean_logprob(impl):
    row = torch.randn(1, 40) * 3
    every = token_logprobs(row.expand(40, 40), torch.arange(40), impl=impl)
    entropy, _ = entropy_and_grad(row, impl)
    assert_close(entropy[0], -(every.exp() * every).sum(), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [37, 1025])
def test_values_and_gradients_within_budget(impl, dtype, columns):
    logits = (torch.randn(5, 9, columns) * 3).to(dtype)
    logits[0, 0, : columns // 2] = -INF
    tokens, mask = torch.randint(columns // 2, columns, (5, 9)), torch.rand(5, 9) < 0.7
    weights = torch.randn(2, 5, 9)

    def run(z, impl):
        z = z.clone().requires_grad_()
        logprobs, entropy = token_logprobs_and_entropy(
            z, tokens, temperature=0.7, response_mask=mask, impl=impl
        )
        loss = (weights[0] * logprobs + weights[1] * entropy).sum()
        return logprobs, entropy, torch.autograd.grad(loss, z)[0]

    results = (run(logits, impl), run(logits.double(), "reference"), run(logits, "reference"))
    for got, truth, own in zip(*results, strict=True):
        assert_within_error_budget(got, truth, own)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("banned", [False, True])
def test_gradcheck(impl, banned):
    free = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([0, 4, -100, 1])

    def both(z):
        if banned:
            z = torch.cat([z, z.new_full((4, 1), -INF)], 1)
        return token_logprobs_and_entropy(z, tokens, temperature=1.3, impl=impl)

    torch.autograd.gradcheck(both, free)


def test_logprobs_are_those_of_token_logprobs(impl):
    logits, tokens = torch.randn(6, 50), torch.randint(50, (6,))
    both = token_logprobs_and_entropy(logits, tokens, temperature=0.6, impl=impl)
    alone = token_logprobs(logits, tokens, temperature=0.6, impl=impl)
    assert_close(both[0], alone, rtol=0, atol=1e-6)


def test_only_one_of_the_two_is_used(impl):
    logits, tokens = torch.randn(6, 50, requires_grad=True), torch.randint(50, (6,))
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, impl=impl)
    (of_logprobs,) = torch.autograd.grad(logprobs.sum(), logits, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)
    (of_both,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert_close(of_logprobs + of_entropy, of_both, **CLOSE)
    assert of_entropy.abs().max() > 1e-3


@pytest.mark.parametrize("rubbish", [math.nan, INF])
def test_masked_rows_have_no_effect(impl, rubbish):
    mask = torch.tensor([True, False, True])
    logits = torch.randn(3, 6)
    dirty = torch.where(mask[:, None], logits, rubbish)
    entropy, grad = entropy_and_grad(dirty, impl, response_mask=mask)
    want, want_grad = entropy_and_grad(logits, impl)
    assert_close(entropy, torch.where(mask, want, 0), rtol=0, atol=1e-7)
    assert_close(grad, torch.where(mask[:, None], want_grad, 0), rtol=0, atol=1e-7)


def test_large_offsets_cancel(impl):
    logits = torch.randint(-8, 8, (4, 9)).float()
    plain, _ = entropy_and_grad(logits, impl)
    moved, _ = entropy_and_grad(logits + 10_000, impl)
    assert_close(moved, plain, rtol=0, atol=2e-6)


def test_nan_where_a_token_counts_stays(impl):
    logits = torch.tensor([[0.0, math.nan], [0.0, 1.0]])
    entropy, _ = entropy_and_grad(logits, impl)
    assert entropy.isnan().tolist() == [True, False]


def test_empty_and_ignored(impl):
    entropy, grad = entropy_and_grad(torch.randn(2, 0, 5), impl)
    assert entropy.shape == (2, 0)
    assert grad.shape == (2, 0, 5)
    entropy, grad = entropy_and_grad(torch.randn(1, 5), impl, torch.tensor([-100]))
    assert entropy.item() == 0
    assert torch.equal(grad, torch.zeros(1, 5))


def test_compiles_without_graph_breaks(impl):
    def loss(x, tokens):
        logprobs, entropy = token_logprobs_and_entropy(2 * x, tokens, impl=impl)
        return (logprobs - 0.1 * entropy).sum()

    x, tokens = torch.randn(3, 9, requires_grad=True), torch.randint(9, (3,))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(x, tokens), x)
    (want,) = torch.autograd.grad(loss(x, tokens), x)
    assert_close(got, want, rtol=0, atol=1e-6)


def test_refusal_is_that_of_token_logprobs():
    with pytest.raises(TypeError, match=r"tokens must be torch\.int64, got torch\.int32"):
        token_logprobs_and_entropy(torch.randn(2, 5), torch.zeros(2, dtype=torch.int32))
