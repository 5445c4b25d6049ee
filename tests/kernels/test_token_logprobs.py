"""Log-probabilities from logits: values, gradients and their edges.

The contract beside the numbers is in test_token_logprobs_contract.py.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import token_logprobs
from ppo_kernels.testing import assert_within_error_budget

INF = float("inf")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def grad_of(logits, tokens, upstream=None, **options):
    """Values and gradient, with the upstream gradient 1 by default."""
    logits = logits.detach().requires_grad_()
    logprobs = token_logprobs(logits, tokens, **options)
    upstream = torch.ones_like(logprobs) if upstream is None else upstream.to(logprobs.dtype)
    (grad,) = torch.autograd.grad(logprobs, logits, upstream)
    return logprobs.detach(), grad


def test_two_columns_on_paper(impl):
    # softmax([0, ln 3]) = [1/4, 3/4]; d logp(0) = [1 − 1/4, −3/4]
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    logprobs, grad = grad_of(logits, torch.tensor([0, 1]), impl=impl)
    assert_close(logprobs, torch.tensor([math.log(0.25), math.log(0.75)]), **CLOSE)
    assert_close(grad, torch.tensor([[0.75, -0.75], [-0.25, 0.25]]), **CLOSE)


def test_rows_below_zero_do_not_see_a_phantom_zero(impl):
    # verl#5349: columns past the end counted as logits of 0
    first = token_logprobs(torch.tensor([-10.0, -11, -12, -13, -14]), torch.tensor(0), impl=impl)
    second = token_logprobs(torch.tensor([-20.0, -40, -40, -40, -40]), torch.tensor(0), impl=impl)
    assert_close(first, torch.tensor(-0.451914396), **CLOSE)
    assert_close(second, torch.tensor(-8.2446e-9), rtol=0, atol=1e-7)


@pytest.mark.parametrize("columns", [5, 33, 1000, 32001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_within_budget(impl, columns, dtype):
    logits = (torch.randn(7, columns) * 3 - 5).to(dtype)
    tokens, upstream = torch.randint(columns, (7,)), torch.randn(7)
    got = grad_of(logits, tokens, upstream, temperature=0.7, impl=impl)
    own = grad_of(logits, tokens, upstream, temperature=0.7, impl="reference")
    truth = grad_of(logits.double(), tokens, upstream, temperature=0.7, impl="reference")
    assert got[0].dtype == torch.float32
    assert got[1].dtype == dtype
    for g, t, o in zip(got, truth, own, strict=True):
        assert_within_error_budget(g, t, o)


def test_float64_is_computed_in_float64():
    logits, tokens = torch.randn(4, 100, dtype=torch.float64), torch.randint(100, (4,))
    by_definition = logits[range(4), tokens] - logits.exp().sum(-1).log()
    for impl in ("reference", "torch"):
        got = token_logprobs(logits, tokens, impl=impl)
        assert_close(got, by_definition, rtol=0, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradcheck(impl):
    logits = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 4], [2, -100], [1, 1]])
    torch.autograd.gradcheck(
        lambda z: token_logprobs(z, tokens, temperature=0.8, vocab_size=5, impl=impl), logits
    )


@pytest.mark.parametrize("finite", [0, 5, 7])
def test_all_columns_banned_but_one(impl, finite):
    # flash-attention#1930
    logits = torch.full((1, 8), -INF)
    logits[0, finite] = 10
    logprobs, grad = grad_of(logits, torch.tensor([finite]), impl=impl)
    assert logprobs.item() == 0
    assert torch.equal(grad, torch.zeros(1, 8))
    other, grad = grad_of(logits, torch.tensor([(finite + 1) % 8]), impl=impl)
    assert other.item() == -INF
    assert not grad.isnan().any()


def test_one_finite_column_in_many_tiles(impl):
    logits = torch.full((1, 100_000), -INF)
    logits[0, 50_000] = 10
    assert token_logprobs(logits, torch.tensor([50_000]), impl=impl).item() == 0


def test_a_row_without_any_probability_is_nan_only_where_it_counts(impl):
    logits = torch.full((2, 6), -INF)
    got = token_logprobs(logits, torch.tensor([1, -100]), impl=impl)
    assert got[0].isnan()
    assert got[1] == 0


def test_ignored_tokens(impl):
    # ml-cross-entropy#59
    logits = torch.tensor([[1.0, 2, 3, 4, 5]] * 3)
    logprobs, grad = grad_of(logits, torch.tensor([4, 0, -100]), impl=impl)
    assert_close(logprobs, torch.tensor([-0.451914396, -4.451914396, 0.0]), **CLOSE)
    assert torch.equal(grad[2], torch.zeros(5))


@pytest.mark.parametrize("rubbish", [math.nan, INF, -INF])
def test_masked_rows_have_no_effect(impl, rubbish):
    logits, tokens = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    mask = torch.tensor([[True, False, True], [False, False, False]])
    dirty = torch.where(mask[..., None], logits, rubbish)
    got = grad_of(dirty, tokens.where(mask, 999), response_mask=mask, impl=impl)
    want = grad_of(logits, tokens.where(mask, -100), impl=impl)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert (got[1][~mask] == 0).all()


def test_padding_columns_are_never_read(impl):
    logits, tokens = torch.randn(4, 7), torch.randint(7, (4,))
    padded = torch.cat([logits, torch.full((4, 3), math.nan)], 1)
    want, want_grad = grad_of(logits, tokens, impl=impl)
    got, got_grad = grad_of(padded, tokens, vocab_size=7, impl=impl)
    assert_close(got, want, rtol=0, atol=1e-6)
    assert_close(got_grad, torch.cat([want_grad, torch.zeros(4, 3)], 1), rtol=0, atol=1e-6)


def test_transposed_logits(impl):
    # TransformerEngine#2734
    base = (torch.arange(12.0).reshape(2, 2, 3) ** 2) / 10
    tokens = torch.tensor([[0, 1], [2, 0]])
    want = torch.tensor([[-1.280098946, -1.749933649], [-0.47528104, -4.131705285]])
    logprobs, grad = grad_of(base.transpose(0, 1), tokens, impl=impl)
    assert_close(logprobs, want, **CLOSE)
    _, contiguous = grad_of(base.transpose(0, 1).contiguous(), tokens, impl=impl)
    assert_close(grad, contiguous, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :-1],
        lambda x: x[:, 1:],
        lambda x: x[..., 3:],
        lambda x: x[..., ::2],
        lambda x: x.permute(1, 0, 2),
        lambda x: x[:1].expand(3, -1, -1),
        lambda x: x[:, 0],
        lambda x: x.mT,
    ],
)
def test_any_strides(impl, view):
    logits = view(torch.randn(4, 6, 12))
    tokens = torch.randint(logits.shape[-1], (*logits.shape[:-1], 2))[..., 0]
    upstream = torch.randn(*logits.shape[:-1], 2)[..., 0]
    got = grad_of(logits, tokens, upstream, impl=impl)
    want = grad_of(logits.contiguous(), tokens.contiguous(), upstream, impl=impl)
    assert_close(got, want, rtol=0, atol=1e-6)


def test_upstream_gradient_per_token(impl):
    # Liger-Kernel#968: it was read as a scalar
    logits, tokens = torch.zeros(3, 2), torch.tensor([0, 0, 1])
    _, grad = grad_of(logits, tokens, torch.tensor([1.0, 0, -2]), impl=impl)
    assert_close(grad, torch.tensor([[0.5, -0.5], [0, 0], [1, -1]]), **CLOSE)
    _, grad = grad_of(logits, tokens, torch.tensor([0.0, 1, 1]), impl=impl)
    assert_close(grad, torch.tensor([[0, 0], [0.5, -0.5], [-0.5, 0.5]]), **CLOSE)
    x = torch.randn(3, 5, requires_grad=True)
    token_logprobs(x, tokens, impl=impl).mean().backward()  # an expanded gradient, stride 0
    assert_close(x.grad, grad_of(x, tokens, impl=impl)[1] / 3, **CLOSE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_same_values_with_and_without_gradients(impl, mode):
    # Liger-Kernel#507
    rows = [
        [-0.1118, 0.0162, 0.0956],
        [-0.1134, 0.0088, 0.1046],
        [-0.1737, 0.1315, 0.0422],
        [-0.0921, 0.0728, 0.0194],
    ]
    with mode():
        got = token_logprobs(torch.tensor(rows), torch.zeros(4, dtype=torch.int64), impl=impl)
    assert_close(got, torch.tensor([-1.214030, -1.215971, -1.280343, -1.193082]), **CLOSE)


def test_temperature(impl):
    # OpenRLHF#853
    logits, token = torch.tensor([2.0, 0.0]), torch.tensor(0)
    tempered = token_logprobs(logits, token, temperature=0.5, impl=impl)
    assert_close(tempered, torch.tensor(-0.018149928), **CLOSE)
    assert_close(token_logprobs(logits, token, impl=impl), torch.tensor(-0.126928011), **CLOSE)


def test_bfloat16_logits_are_summed_in_float32(impl):
    # Liger-Kernel#672
    logits = torch.tensor([[20.0, 19.875, 5, 0]] * 2, dtype=torch.bfloat16)
    got = token_logprobs(logits, torch.tensor([1, 0]), impl=impl)
    assert got.dtype == torch.float32
    assert_close(got, torch.tensor([-0.757599199, -0.632599199]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", [0.0, -0.3, -5.0, -7.3])
def test_nearly_flat_rows_of_a_large_vocabulary(level):
    # A sum of 151936 equal terms, one after the other, is off by up to 1e-4 in float32.
    columns = 151_936
    logits = torch.full((1, columns), level)
    logits[0, 7] = 0
    exact = -math.log1p((columns - 1) * math.exp(torch.tensor(level).item()))
    logprobs, grad = grad_of(logits, torch.tensor([7]), impl="torch")
    assert abs(logprobs.item() - exact) < 2e-6
    assert abs(grad.sum().item()) < 1e-5


def test_large_offsets_cancel(impl):
    logits, tokens = torch.randint(-8, 8, (4, 9)).float(), torch.randint(9, (4,))
    plain = token_logprobs(logits, tokens, impl=impl)
    assert_close(token_logprobs(logits + 10_000, tokens, impl=impl), plain, rtol=0, atol=2e-6)


def test_probabilities_sum_to_one(impl):
    row = torch.randn(1, 50) * 4
    every = token_logprobs(row.expand(50, 50), torch.arange(50), impl=impl)
    assert_close(every.exp().sum(), torch.tensor(1.0), **CLOSE)
    assert (every <= 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty_batches(impl, shape):
    logits = torch.randn(*shape, 7, requires_grad=True)
    logprobs = token_logprobs(logits, torch.zeros(shape, dtype=torch.int64), impl=impl)
    logprobs.sum().backward()
    assert logprobs.shape == shape
    assert logits.grad.shape == (*shape, 7)


def test_every_token_ignored_gives_a_zero_gradient_and_not_none(impl):
    logits = torch.randn(2, 3, requires_grad=True)
    token_logprobs(logits, torch.tensor([-100, -100]), impl=impl).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_same_bits_every_time_and_logits_untouched(impl):
    logits, tokens = torch.randn(5, 300), torch.randint(300, (5,))
    before = logits.clone()
    first = grad_of(logits, tokens, temperature=0.9, impl=impl)
    second = grad_of(logits, tokens, temperature=0.9, impl=impl)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(logits, before)
