"""KL penalty, token rewards, moments and whitening in Triton, in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_kernels import reference
from ppo_kernels._triton import rewards, tiling, whiten
from ppo_kernels.testing import assert_within_error_budget

ESTIMATORS = ["k1", "abs", "k2", "k3"]
SHAPES = [(1, 1), (3, 7), (7, 64), (13, 53)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    shapes = [(1, 64), (1, 32), (4, 16), (2, 32)]
    monkeypatch.setattr(tiling, "TILES", dict(zip(tiling.TILES, shapes, strict=True)))
    monkeypatch.setattr(tiling, "SLOTS_PER_WARP", 1)  # four slots at a time
    monkeypatch.setattr(tiling, "ROW_TILES", {20: tiling.RowTile(4, 8, 1), 2048: ROW_TILE})
    monkeypatch.setattr(tiling, "LONG_ROW_TILE", ROW_TILE)
    monkeypatch.setattr(whiten, "MAX_PROGRAMS", 6)
    monkeypatch.setattr(whiten, "ONE_TILE", 128)


ROW_TILE = tiling.RowTile(1, 32, 1)


def draw(n_rows, n_cols, seed=0, dtype=torch.float32):
    """logprobs, ref_logprobs, upstream gradient, mask, scores."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, n_rows, n_cols, generator=g).to(dtype)
    mask = torch.rand(n_rows, n_cols, generator=g) < 0.6
    return *x.unbind(), mask, torch.randn(n_rows, generator=g).to(dtype)


def kl_with_gradients(kl, logprobs, ref, upstream, *rest):
    logprobs, ref = logprobs.clone().requires_grad_(), ref.clone().requires_grad_()
    out = kl(logprobs, ref, *rest)
    out.backward(upstream.to(out.dtype))
    return out, logprobs.grad, ref.grad


def specified_kl(logprobs, ref, estimator, mask):
    return reference.kl_penalty(logprobs, ref, estimator=estimator, response_mask=mask)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_kl_penalty_and_both_gradients(shape, estimator):
    logprobs, ref, upstream, mask, _ = draw(*shape)
    logprobs, ref = (torch.where(mask, x, math.nan) for x in (logprobs, ref))
    inputs = (logprobs, ref, upstream)
    got = kl_with_gradients(rewards.kl_penalty, *inputs, estimator, mask)
    truth = kl_with_gradients(specified_kl, *(x.double() for x in inputs), estimator, mask)
    torch_fp32 = kl_with_gradients(specified_kl, *inputs, estimator, mask)
    for mine, want, baseline in zip(got, truth, torch_fp32, strict=True):
        assert_within_error_budget(mine, want, baseline)
        assert not mine[~mask].any()


def test_kl_penalty_worked_example():
    """Δ = ln 2: k2 = ½ ln² 2, k3 = ½ − 1 + ln 2; slopes 1, 1, Δ, 1 − ½."""
    ln2, one = math.log(2), torch.ones(1, 1)
    want = {"k1": (ln2, 1), "abs": (ln2, 1), "k2": (0.5 * ln2**2, ln2), "k3": (ln2 - 0.5, 0.5)}
    for estimator, (value, slope) in want.items():
        inputs = (ln2 * one, 0 * one, one, estimator, None)
        out, grad, ref_grad = kl_with_gradients(rewards.kl_penalty, *inputs)
        assert out.item() == pytest.approx(value, rel=1e-6)
        assert grad.item() == pytest.approx(slope, rel=1e-6)
        assert ref_grad.item() == -grad.item()


def test_kl_penalty_near_and_far_from_zero():
    delta = torch.tensor([[1e-4, -1e-4, 0.0, 200.0, -200.0, -1e30]])
    inputs = (delta, torch.zeros_like(delta), torch.ones_like(delta))
    out, grad, _ = kl_with_gradients(rewards.kl_penalty, *inputs, "k3", None)
    assert out.isfinite().all()
    assert out[0, :3].tolist() == pytest.approx([5e-9, 5e-9, 0], rel=1e-4)
    assert out[0, 3].item() == 199
    assert grad[0, :3].tolist() == pytest.approx([1e-4, -1e-4, 0], rel=1e-4)
    assert grad[0, 4].item() == grad[0, 5].item() == pytest.approx(-math.exp(88), rel=1e-5)
    out, grad, _ = kl_with_gradients(rewards.kl_penalty, *inputs, "k2", None)
    assert out.isfinite().all()
    assert grad[0, -1].item() == pytest.approx(-1.8e19)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_penalty_shows_nan_where_a_token_counts(estimator):
    logprobs, ref, *_ = draw(2, 5)
    logprobs[1, 3] = math.nan
    out = rewards.kl_penalty(logprobs, ref, estimator, None)
    assert out.isnan().sum() == 1
    assert out[1, 3].isnan()


def test_kl_penalty_with_an_expanded_gradient_and_transposed_inputs():
    logprobs, ref, _, mask, _ = draw(9, 21)
    upstream = torch.tensor(0.5).expand(9, 21)
    want = kl_with_gradients(rewards.kl_penalty, logprobs, ref, upstream, "k2", mask)
    turned = [x.t().contiguous().t() for x in (logprobs, ref, mask)]
    got = kl_with_gradients(rewards.kl_penalty, *turned[:2], upstream, "k2", turned[2])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_kl_penalty_refuses_a_second_derivative():
    logprobs, ref, *_ = draw(2, 5)
    out = rewards.kl_penalty(logprobs.requires_grad_(), ref, "k3", None)
    with pytest.raises(RuntimeError, match="kl_penalty can be differentiated once only"):
        torch.autograd.grad(out.sum(), logprobs, create_graph=True)


def test_token_rewards_worked_example():
    """β = ½, Δ = 2 everywhere: −1 at each token that counts, the score 10 at the last of them."""
    mask = torch.zeros(3, 70, dtype=torch.bool)
    mask[0, [0, 1, 33, 40]] = True
    mask[2, 69] = True
    logprobs, scores = torch.full((3, 70), 2.0), torch.tensor([10.0, 20.0, 30.0])
    got = rewards.token_rewards(scores, logprobs, 0 * logprobs, mask, 0.5, "k1")
    want = torch.zeros(3, 70)
    want[0, [0, 1, 33, 40]] = torch.tensor([-1.0, -1, -1, 9])
    want[2, 69] = 29
    assert torch.equal(got, want)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_token_rewards(shape, estimator):
    logprobs, ref, _, mask, scores = draw(*shape)
    mask[0] = False
    logprobs, ref = (torch.where(mask, x, math.inf) for x in (logprobs, ref))
    got = rewards.token_rewards(scores, logprobs, ref, mask, 0.3, estimator)
    inputs, settings = (scores, logprobs, ref), {"kl_coef": 0.3, "estimator": estimator}
    truth = reference.token_rewards(*(x.double() for x in inputs), mask, **settings)
    assert_within_error_budget(got, truth, reference.token_rewards(*inputs, mask, **settings))
    assert not got[~mask].any()


def test_moments_and_whitening_of_a_small_spread_far_from_zero():
    """Values of 1000 ± 0.01, as float64 sees the same float32 numbers."""
    noise, _, _, mask, _ = draw(13, 53)
    x = torch.where(mask, 1000 + 0.01 * noise, math.nan)
    kept = x[mask].double()
    want = [float(len(kept)), kept.mean().item(), kept.var(correction=0).item() * len(kept)]
    torch.testing.assert_close(whiten.masked_moments(x, mask).tolist(), want, rtol=1e-6, atol=0)
    y = whiten.whiten(x, mask, True, 1e-8, None)[mask].double()
    exact = (kept - kept.mean()) / (kept.var() + 1e-8).sqrt()
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 16), (13, 53)])
def test_whiten(shape, layout, shift_mean):
    x, _, _, mask, _ = draw(*shape)
    x = torch.where(mask, x, math.nan)
    if layout == "transposed":
        x, mask = x.t().contiguous().t(), mask.t().contiguous().t()
    given = torch.tensor([50.0, 0.3, 40.0])
    for moments in (None, given):
        got = whiten.whiten(x, mask, shift_mean, 1e-8, moments)
        truth = None if moments is None else moments.double()
        truth = reference.whiten(x.double(), mask, shift_mean=shift_mean, moments=truth)
        torch_fp32 = reference.whiten(x, mask, shift_mean=shift_mean, moments=moments)
        assert_within_error_budget(got, truth, torch_fp32)
        assert not got[~mask].any()


def test_whitening_one_token_or_none_is_finite():
    x, mask = torch.full((3, 50), 7.0), torch.zeros(3, 50, dtype=torch.bool)
    assert not whiten.whiten(x, mask, True, 1e-8, None).any()
    assert whiten.masked_moments(x, mask).tolist() == [0, 0, 0]
    mask[1, 49] = True
    assert not whiten.whiten(x, mask, True, 1e-8, None).any()
    assert whiten.whiten(x, mask, False, 1e-8, None)[1, 49] == 7
    assert whiten.masked_moments(x, mask).tolist() == [1, 7, 0]


def test_moments_of_ranks_add_up_to_those_of_all():
    x, _, _, mask, _ = draw(13, 53)
    parts = [whiten.masked_moments(x[rows], mask[rows]) for rows in (slice(5), slice(5, 13))]
    joint = reference.combine_moments(torch.stack(parts))
    torch.testing.assert_close(joint, whiten.masked_moments(x, mask), rtol=1e-6, atol=1e-7)
    halves = [
        whiten.whiten(x[rows], mask[rows], True, 1e-8, joint) for rows in (slice(5), slice(5, 13))
    ]
    whole = whiten.whiten(x, mask, True, 1e-8, None)
    torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-5, atol=1e-6)


def test_nan_where_a_token_counts_shows():
    x, _, _, mask, _ = draw(13, 53)
    mask[12, 50], x[12, 50] = True, math.nan
    assert whiten.masked_moments(x, mask)[1:].isnan().all()
    assert whiten.whiten(x, mask, True, 1e-8, None)[mask].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    logprobs, ref, upstream, mask, scores = draw(5, 33, dtype=dtype)
    wide = [x.float() for x in (logprobs, ref, upstream, scores)]
    got = kl_with_gradients(rewards.kl_penalty, logprobs, ref, upstream, "k3", mask)
    want = kl_with_gradients(rewards.kl_penalty, *wide[:3], "k3", mask)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1].to(dtype))
    got = rewards.token_rewards(scores, logprobs, ref, mask, 0.1, "k2")
    assert torch.equal(got, rewards.token_rewards(wide[3], *wide[:2], mask, 0.1, "k2"))
    got = whiten.whiten(logprobs, mask, True, 1e-8, None)
    assert torch.equal(got, whiten.whiten(wide[0], mask, True, 1e-8, None))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty(shape):
    logprobs, ref, upstream, mask, scores = draw(*shape)
    for out in kl_with_gradients(rewards.kl_penalty, logprobs, ref, upstream, "k1", mask):
        assert out.shape == shape
    assert rewards.token_rewards(scores, logprobs, ref, mask, 0.1, "k1").shape == shape
    assert whiten.whiten(logprobs, mask, True, 1e-8, None).shape == shape
    assert whiten.masked_moments(logprobs, mask).tolist() == [0, 0, 0]


def test_the_same_bits_every_time_and_the_ticket_returns_to_zero():
    x, _, _, mask, _ = draw(17, 71)
    assert torch.equal(whiten.masked_moments(x, mask), whiten.masked_moments(x, mask))
    first, second = (whiten.whiten(x, mask, True, 1e-8, None) for _ in range(2))
    assert torch.equal(first, second)
    assert tiling.ticket(x.device).item() == 0


def test_offsets_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    logprobs, ref, _, mask, _ = draw(3, 5)
    far = torch.empty_strided((3, 5), (2**30, 1), dtype=torch.bfloat16).copy_(logprobs)
    got = rewards.kl_penalty(far, ref, "k1", mask)
    assert torch.equal(got, rewards.kl_penalty(far.contiguous(), ref, "k1", mask))
    assert torch.equal(whiten.masked_moments(far, mask)[0], mask.sum())


def test_registration_and_full_graph():
    logprobs, ref, upstream, mask, scores = draw(2, 9)
    cases = {
        "kl_penalty": (logprobs.clone().requires_grad_(), ref, mask, "k3"),
        "kl_penalty_backward": (upstream, logprobs, ref, mask, "k3"),
        "token_rewards": (scores, logprobs, ref, mask, 0.1, "k1"),
        "masked_moments": (logprobs, mask),
        "whiten": (logprobs, mask, True, 1e-8, None),
    }
    for name, arguments in cases.items():
        torch.library.opcheck(getattr(torch.ops.ppo_kernels, name), arguments)
    graph = torch.compile(rewards.kl_penalty, fullgraph=True, backend="aot_eager")
    got = kl_with_gradients(graph, logprobs, ref, upstream, "k3", mask)
    want = kl_with_gradients(rewards.kl_penalty, logprobs, ref, upstream, "k3", mask)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", [rewards.token_rewards, whiten.whiten, whiten.masked_moments])
def test_no_gradient_leaves_the_graph(op):
    logprobs, ref, _, mask, scores = draw(2, 9)
    logprobs.requires_grad_()
    arguments = {
        "token_rewards": (scores, logprobs, ref, mask, 0.1, "k1"),
        "whiten": (logprobs, mask, True, 1e-8, None),
        "masked_moments": (logprobs, mask),
    }[op.__name__]
    eager = op(*arguments)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(eager, compiled)
    assert not eager.requires_grad
    assert not compiled.requires_grad
