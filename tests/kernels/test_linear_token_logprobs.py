"""Log-probabilities and entropy from hidden states: values, gradients, edges."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import reference
from ppo_kernels.linear_token_logprobs import (
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
)
from ppo_kernels.testing import assert_within_error_budget

HEADS = {
    "plain": {},
    "scale": {"logit_scale": 0.25, "temperature": 0.7},
    "softcap": {"logit_scale": 2.0, "logit_softcap": 3.0, "temperature": 1.5},
}


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def head(request):
    return request.param


def sample(n=13, d=8, v=37, dtype=torch.float32):
    """hidden, weight, bias, tokens."""
    x = (torch.randn(n, d), torch.randn(v, d), torch.randn(v))
    return *(t.to(dtype) for t in x), torch.randint(v, (n,))


def run(operator, hidden, weight, bias, tokens, **options):
    """logprobs, entropy, and the gradients of a weighted sum to hidden, weight and bias."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    results = operator(leaves[0], leaves[1], tokens, bias=leaves[2], **options)
    up = torch.linspace(-1, 1, 2 * tokens.numel()).view(2, *tokens.shape).to(results[0].dtype)
    return [*results, *torch.autograd.grad(results, leaves, tuple(up))]


def plain(hidden, weight, tokens, *, bias, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    """What a model does, at its own precision, and then log_softmax in float32."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_a_model_with_full_logits(head, dtype, impl):
    x = sample(dtype=dtype)
    wide = [t.double() for t in x[:3]]
    oracle = run(reference.linear_token_logprobs_and_entropy, *wide, x[3], **head)
    baseline = run(plain if impl != "reference" else reference.linear_token_logprobs_and_entropy,
                   *x, **head)  # fmt: skip
    for chunk_bytes in (1, 500, None):
        options = {**head, "chunk_bytes": chunk_bytes, "impl": impl}
        results = run(linear_token_logprobs_and_entropy, *x, **options)
        for got, want, own in zip(results, oracle, baseline, strict=True):
            assert_within_error_budget(got, want, own)


def test_logprobs_alone_are_those_with_entropy(head, impl):
    hidden, weight, bias, tokens = sample()
    hidden.requires_grad_()
    options = {**head, "bias": bias, "impl": impl}
    alone = linear_token_logprobs(hidden, weight, tokens, **options)
    both = linear_token_logprobs_and_entropy(hidden, weight, tokens, **options)
    assert_close(alone, both[0], rtol=0, atol=1e-6)
    got, want = (torch.autograd.grad(x.sum(), hidden)[0] for x in (alone, both[0]))
    assert_close(got, want, rtol=0, atol=1e-6)


def test_worked_example(impl):
    # h·w = (ln 1, ln 2, ln 3, ln 4): π = (.1, .2, .3, .4); d log π_1/dh = Σ_v (1{1} − π_v)·w_v
    weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).log()
    hidden, tokens = torch.ones(1, 1, requires_grad=True), torch.tensor([1])
    got = linear_token_logprobs(hidden, weight, tokens, impl=impl)
    assert_close(got, torch.tensor([math.log(0.2)]))
    (grad,) = torch.autograd.grad(got, hidden)
    want = 0.8 * math.log(2) - 0.3 * math.log(3) - 0.4 * math.log(4)
    assert_close(grad, torch.tensor([[want]]))


@pytest.mark.parametrize("chunk_bytes", [1, 37 * 4 * 3, 37 * 4 * 12, 1 << 30])
def test_chunk_size_changes_no_logprob(chunk_bytes, impl):
    hidden, weight, bias, tokens = sample()
    x = (hidden, weight, bias, tokens)
    got = run(linear_token_logprobs_and_entropy, *x, chunk_bytes=chunk_bytes, impl=impl)
    want = run(linear_token_logprobs_and_entropy, *x, impl="reference")
    assert_close(got, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_positions_have_no_effect(rubbish, head, impl):
    hidden, weight, bias, tokens = sample()
    mask = torch.rand(13) < 0.6
    tokens[0], mask[0], mask[1], mask[2] = -100, True, False, True
    counted = mask & (tokens != -100)
    dirty = torch.where(counted[:, None], hidden, rubbish)
    options = {**head, "chunk_bytes": 600, "impl": impl}
    operator = linear_token_logprobs_and_entropy
    got = run(operator, dirty, weight, bias, tokens, response_mask=mask, **options)
    clean = torch.where(counted, tokens, -100)
    want = run(operator, hidden, weight, bias, clean, **{**options, "impl": "reference"})
    assert_close(got, want, rtol=0, atol=3e-6)
    for x in got[:3]:
        assert (x[~counted] == 0).all()


def test_tokens_out_of_range_do_not_matter_where_masked(impl):
    hidden, weight, bias, tokens = sample()
    tokens[5] = 99
    mask = tokens < 37
    x = (hidden, weight, bias)
    got = run(linear_token_logprobs_and_entropy, *x, tokens, response_mask=mask, impl=impl)
    tokens[5] = 0
    want = run(linear_token_logprobs_and_entropy, *x, tokens, response_mask=mask, impl=impl)
    assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,), (2, 3), ()])
def test_nothing_counts(shape, impl):
    hidden, weight, bias, _ = sample()
    hidden = torch.full((*shape, 8), math.nan)
    tokens = torch.full(shape, -100)
    got = run(linear_token_logprobs_and_entropy, hidden, weight, bias, tokens, impl=impl)
    assert [x.shape for x in got] == [shape, shape, hidden.shape, weight.shape, bias.shape]
    assert all((x == 0).all() for x in got)


@pytest.mark.parametrize("v", [1, 2, 31, 127, 130])
def test_any_vocabulary_and_any_leading_shape(v, impl):
    hidden, weight, bias, tokens = sample(12, 5, v)
    hidden, tokens = hidden.view(2, 2, 3, 5), tokens.view(2, 2, 3)
    operator = linear_token_logprobs_and_entropy
    got = run(operator, hidden, weight, bias, tokens, impl=impl, chunk_bytes=7 * v * 4)
    want = run(operator, hidden, weight, bias, tokens, impl="reference")
    assert_close(got, want, rtol=0, atol=3e-6)


def test_transposed_weight_and_strided_hidden(impl):
    """GPT-2's Conv1D keeps weights as [D, V]; hidden states are often a slice."""
    hidden, weight, bias, tokens = sample()
    stored = weight.t().contiguous().requires_grad_()
    wider = torch.randn(13, 16)
    wider[:, ::2] = hidden
    got = linear_token_logprobs(wider[:, ::2], stored.t(), tokens, bias=bias, impl=impl)
    got.sum().backward()
    weight.requires_grad_()
    want = linear_token_logprobs(hidden, weight, tokens, bias=bias, impl="reference")
    want.sum().backward()
    assert_close(got, want, rtol=0, atol=3e-6)
    assert_close(stored.grad.t(), weight.grad, rtol=0, atol=3e-6)


def test_tied_weights_get_both_gradients(impl):
    """An embedding that is the LM head as well."""
    _, weight, _, tokens = sample()
    grads = []
    for chosen in (impl, "reference"):
        tied = weight.clone().requires_grad_()
        logprobs = linear_token_logprobs(tied[tokens.flip(0)], tied, tokens, impl=chosen)
        logprobs.sum().backward()
        grads.append(tied.grad)
    assert_close(*grads, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained", range(3))
def test_frozen_inputs_get_no_gradient(trained, impl):
    leaves = list(sample()[:3])
    tokens = torch.randint(37, (13,))
    leaves[trained].requires_grad_()
    result = linear_token_logprobs(*leaves[:2], tokens, bias=leaves[2], impl=impl)
    result.sum().backward()
    assert [x.grad is not None for x in leaves] == [i == trained for i in range(3)]
    leaf = leaves[trained].detach().clone().requires_grad_()
    again = [x.detach() if i != trained else leaf for i, x in enumerate(leaves)]
    oracle = reference.linear_token_logprobs(*again[:2], tokens, bias=again[2])
    (expected,) = torch.autograd.grad(oracle.sum(), leaf)
    assert_close(leaves[trained].grad, expected, rtol=0, atol=3e-6)


def test_banned_by_bias(impl):
    hidden, weight, bias, tokens = sample()
    bias[3] = bias[tokens[0]] = -math.inf
    got = linear_token_logprobs_and_entropy(hidden, weight, tokens, bias=bias, impl=impl)
    want = linear_token_logprobs_and_entropy(hidden, weight, tokens, bias=bias, impl="reference")
    assert got[0][0] == -math.inf
    assert_close(got, want, rtol=0, atol=3e-6)


def test_gradcheck(head):
    hidden, weight, bias, tokens = sample(4, 3, 5, torch.float64)
    tokens[1] = -100
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def operator(hidden, weight, bias):
        return linear_token_logprobs_and_entropy(
            hidden, weight, tokens, bias=bias, chunk_bytes=80, **head
        )

    torch.autograd.gradcheck(operator, leaves)
