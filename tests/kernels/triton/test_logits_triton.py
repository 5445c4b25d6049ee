"""Values and gradients of the Triton kernels over logits, against float64 and against paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._triton import logits as ops
from ppo_kernels.testing import assert_within_error_budget

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(v: int, dtype: torch.dtype, rows: int = 4, scale: float = 3.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(v)
    z, r = (torch.randn(2, rows, v, generator=generator) * scale).to(dtype)
    return z, r, torch.randint(v, (rows,), generator=generator)


def statistics(
    z: Tensor, r: Tensor, a: Tensor, *, tau: float = 1.0, v: int | None = None, mask: Any = None
) -> list[Tensor]:
    """All that the kernels compute, by every way to it, and the gradients of weighted sums."""
    z = z.detach().requires_grad_()
    v = v or z.shape[-1]
    weights = torch.linspace(-1, 1, 3 * a.numel()).view(3, *a.shape)
    both = ops.token_statistics(z, r, a, tau, v, mask)
    (d_both,) = torch.autograd.grad(both[:3], z, tuple(weights))
    one = ops.token_logprobs_and_entropy(z, a, tau, v, mask, False)
    (d_one,) = torch.autograd.grad(one, z, tuple(weights[:2]))
    kl = ops.categorical_kl(z, r, tau, v, mask)
    (d_kl,) = torch.autograd.grad(kl, z, weights[2])
    return [*both, d_both, *one, d_one, kl, d_kl]


def expected(
    z: Tensor, r: Tensor, a: Tensor, *, tau: float = 1.0, v: int | None = None, mask: Any = None
) -> list[Tensor]:
    """The same from the specification, in the dtype of z."""
    z = z.detach().requires_grad_()
    weights = torch.linspace(-1, 1, 3 * a.numel(), dtype=z.dtype).view(3, *a.shape).float()
    kwargs: dict[str, Any] = {"temperature": tau, "vocab_size": v, "response_mask": mask}
    lp, h, kl, ref_lp = reference.token_statistics(z, r.to(z.dtype), a, **kwargs)
    just_kl = reference.categorical_kl(z, r.to(z.dtype), **kwargs)
    weights = weights.to(lp.dtype)
    (d_one,) = torch.autograd.grad((lp, h), z, tuple(weights[:2]), retain_graph=True)
    (d_both,) = torch.autograd.grad((lp, h, kl), z, tuple(weights))
    (d_kl,) = torch.autograd.grad(just_kl, z, weights[2])
    return [lp, h, kl, ref_lp, d_both, lp, h, d_one, just_kl, d_kl]


def check(z: Tensor, r: Tensor, a: Tensor, tiny: float | None = None, **kwargs: Any) -> None:
    oracle = expected(z.double(), r.double(), a, **kwargs)
    baseline = expected(z, r, a, **kwargs)
    for got, want, own in zip(statistics(z, r, a, **kwargs), oracle, baseline, strict=True):
        assert_within_error_budget(got, want, own, tiny=tiny)


def test_worked_example() -> None:
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log().requires_grad_()
    uniform, a = torch.zeros(1, 4), torch.tensor([1])
    logprob, entropy, kl, ref_logprob = ops.token_statistics(z, uniform, a, 1.0, 4, None)
    h = -(0.1 * math.log(0.1) + 0.2 * math.log(0.2) + 0.3 * math.log(0.3) + 0.4 * math.log(0.4))
    want = [math.log(0.2), h, math.log(4) - h, -math.log(4)]
    got = torch.cat([logprob, entropy, kl, ref_logprob])
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=2e-7)
    (gradient,) = torch.autograd.grad(logprob.sum(), z)
    torch.testing.assert_close(gradient, torch.tensor([[-0.1, 0.8, -0.3, -0.4]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("v", [1, 2, 127, 1025, 2053])
def test_any_vocabulary_within_error_budget(v: int, dtype: torch.dtype) -> None:
    check(*sample(v, dtype))


@pytest.mark.parametrize("tau", [0.1, 0.7, 3.0])
def test_temperature(tau: float) -> None:
    check(*sample(300, torch.float32), tau=tau)


@pytest.mark.parametrize("offset", [-200.0, -120.0, 1e4])
def test_offset_common_to_a_row_cancels(offset: float) -> None:
    z, r, a = sample(1025, torch.float32, scale=1.0)
    z = (z * 1024).round() / 1024  # so that adding the offset is exact
    shifted = statistics(z + offset, r + offset, a)
    for got, want in zip(shifted, statistics(z, r + offset, a), strict=True):
        assert torch.equal(got, want)


def test_phantom_columns_are_not_counted() -> None:
    z = torch.full((1, 1025), -5.0)
    logprob, entropy = ops.token_logprobs_and_entropy(z, torch.tensor([7]), 1.0, 1025, None, False)
    want = torch.tensor([math.log(1025)])
    torch.testing.assert_close(-logprob, want)
    torch.testing.assert_close(entropy, want)


def test_peaked_rows() -> None:
    z, r, a = sample(2053, torch.float32)
    z[0] -= 120
    z[1] -= 200
    z[2, 17] = 60.0
    z[3, a[3]] = 60.0
    check(z, r, a)


def test_certain_token_is_exactly_certain() -> None:
    z = torch.full((1, 700), -INF)
    z[0, 5] = -123.456
    got = ops.token_statistics(z, z, torch.tensor([5]), 0.3, 700, None)
    assert [x.item() for x in got] == [0, 0, 0, 0]


def test_banned_tokens() -> None:
    z, r, _ = sample(2053, torch.float32)
    z[0, :1100] = r[0, :1100] = -INF  # whole tiles
    z[1, 3::7] = -INF  # banned here, not there
    z[2, 1:] = r[2, 1:] = -INF  # all but one
    z[3, -1] = r[3, -1] = -INF
    check(z, r, torch.tensor([2000, 4, 0, 9]))


def test_lowest_finite_logits_are_logits() -> None:
    lowest = torch.finfo(torch.float32).min
    z = torch.full((1, 40), lowest, requires_grad=True)
    logprob, entropy = ops.token_logprobs_and_entropy(z, torch.tensor([3]), 1.0, 40, None, False)
    torch.testing.assert_close(-logprob, torch.tensor([math.log(40)]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(40)]))


def test_all_banned_is_nan_and_choosing_banned_is_minus_infinity() -> None:
    z = torch.tensor([[-INF, -INF, -INF], [0.0, -INF, 0.0]], requires_grad=True)
    got = ops.token_logprobs(z, torch.tensor([0, 1]), 1.0, 3, None, False)
    assert got[0].isnan()
    assert got[1] == -INF
    (gradient,) = torch.autograd.grad(got[1], z)
    assert gradient[1].tolist() == pytest.approx([-0.5, 1.0, -0.5])


def test_kl_is_infinite_where_the_reference_bans() -> None:
    z, r, _ = sample(700, torch.float32)
    r[0, 600] = -INF
    z.requires_grad_()
    kl = ops.categorical_kl(z, r, 1.0, 700, None)
    (gradient,) = torch.autograd.grad(kl.sum(), z)
    assert kl[0] == INF
    assert kl[1:].isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[0].argmax() == 600


def test_nan_logit_surfaces() -> None:
    z, r, a = sample(700, torch.float32)
    z[1, 650] = NAN
    for got in ops.token_statistics(z, r, a, 1.0, 700, None)[:3]:
        assert got.isnan().tolist() == [False, True, False, False]


def test_padding_of_the_vocabulary_is_not_read() -> None:
    z, r, a = sample(1030, torch.float32)
    a = a.clamp(max=1024)
    check(z, r, a, v=1025)
    z[:, 1025:] = r[:, 1025:] = NAN
    got = statistics(z, r, a, v=1025)
    assert all(x.isfinite().all() for x in got)
    assert (got[4][:, 1025:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_do_not_count(dtype: torch.dtype) -> None:
    z, r, a = sample(600, dtype, rows=5)
    mask = torch.tensor([True, False, True, True, True])
    a[3] = -100
    counts = torch.tensor([True, False, True, False, True])
    clean = statistics(z, r, a, mask=mask)
    z[1] = r[1] = NAN
    z[3] = r[3] = INF
    dirty = statistics(z, r, a, mask=mask)
    for i, (got, want) in enumerate(zip(dirty, clean, strict=True)):
        rows = counts if i < 8 else mask  # categorical_kl has no tokens
        assert (got[~rows] == 0).all()
        assert torch.equal(got[counts], want[counts])


@pytest.mark.parametrize("token", [-1, 600, -(2**40), 2**40])
def test_token_out_of_range_is_nan_and_reads_nothing(token: int) -> None:
    z, r, a = sample(600, torch.float32)
    a[1] = token
    got = statistics(z, r, a)
    for x in [*got[:4], *got[5:7]]:
        assert x.isnan().tolist() == [False, True, False, False]
    assert (got[4][1] == 0).all()
    assert (got[7][1] == 0).all()


def test_gradient_at_the_token_is_rounded_once() -> None:
    z = torch.zeros(1, 2053, dtype=torch.bfloat16)
    z[0, 5] = 17.25
    z.requires_grad_()
    ops.token_logprobs(z, torch.tensor([5]), 1.0, 2053, None, False).sum().backward()
    others = 2052 * math.exp(-17.25)
    assert z.grad is not None
    assert z.grad[0, 5].item() == pytest.approx(others / (1 + others), rel=2**-7)
