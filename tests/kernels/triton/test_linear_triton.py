"""Row kernels in Triton: what the chunk loops rely on, and a whole operator in 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._torch import rows as torch_rows
from ppo_kernels._triton import rows as triton_rows
from ppo_kernels.linear_ppo_loss import linear_ppo_loss
from ppo_kernels.linear_token_logprobs import linear_token_logprobs_and_entropy
from ppo_kernels.testing import assert_within_error_budget

N, V = 5, 61


def chunk(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits whose rows lie apart, as in a chunk with an odd vocabulary; tokens of all kinds."""
    padded = torch.full((N, 64), math.nan, dtype=dtype)
    padded[:, :V] = torch.randn(N, V) * 3
    padded[2] = math.nan  # does not count
    return padded[:, :V], torch.tensor([0, V - 1, -100, 7, V])


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_rows_agree_with_those_in_torch(tau: float, with_entropy: bool) -> None:
    logits, tokens = chunk()
    g_lp, g_h = torch.randn(2, N)
    g_h = g_h if with_entropy else None
    results = []
    for rows in (torch_rows, triton_rows):
        padded = torch.full((N, 64), math.nan)
        z = padded[:, :V].copy_(logits)
        lp, h, stats = rows.forward_rows(z, tokens, tau, with_entropy)
        read = torch.tensor([True, True, False, True, False])
        assert torch.equal(z[read], logits[read])
        rows.backward_rows_(z, tokens, tau, stats, g_lp, g_h)
        assert padded[:, V:].isnan().all()
        m, log_s, entropy = (stats[read] * torch.tensor([1, rows.NATS, rows.NATS])).unbind(1)
        results.append([lp, m, log_s, z, *([h, entropy] if h is not None else [])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6, equal_nan=True)
    assert (z[2] == 0).all()
    assert (z[4] == 0).all()
    assert lp[4].isnan()


def test_pairs_agree_with_those_in_torch() -> None:
    (logits, _), (ref, _) = chunk(), chunk()
    counted, g = torch.arange(N) != 2, torch.randn(N)
    results = []
    for rows in (torch_rows, triton_rows):
        z = logits.clone()
        kl, stats = rows.forward_pair_rows(z, ref, counted, 0.7)
        rows.backward_pair_rows_(z, ref, counted, 0.7, stats, g)
        results.append([kl, z])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    assert (z[2] == 0).all()


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_policy_gradient_is_that_of_the_specification(dual_clip: float | None) -> None:
    logprobs = torch.linspace(-3, 3, 60).requires_grad_()
    old, advantages = torch.zeros(60), torch.randn(60)
    weights = torch.where(torch.arange(60) % 3 == 1, 0, torch.randn(60))
    old[weights == 0] = math.nan
    options = {"cliprange": 0.2, "cliprange_high": 0.4, "dual_clip": dual_clip}
    loss = reference.policy_loss(logprobs, old, advantages, weights, **options).loss
    (want,) = torch.autograd.grad(loss, logprobs)
    assert 0 < (want == 0).sum() < 60
    for rows in (torch_rows, triton_rows):
        x = (logprobs.detach(), old, advantages, weights)
        got = rows.policy_gradient(*x, 0.2, 0.4, dual_clip)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bfloat16_head_within_error_budget(softcap: float | None) -> None:
    """The interpreter truncates to bfloat16 where a GPU rounds: twice the error of a rounding."""
    tokens = torch.randint(V, (N,))
    wide = torch.randn(N, 8, dtype=torch.float64), torch.randn(V, 8, dtype=torch.float64)

    def run(operator, dtype, **options):  # type: ignore[no-untyped-def]
        low = [x.bfloat16().to(dtype).requires_grad_() for x in wide]
        results = operator(*low, tokens, logit_softcap=softcap, **options)
        return [*results, *torch.autograd.grad(results, low, (torch.ones_like(results[0]),) * 2)]

    oracle = run(reference.linear_token_logprobs_and_entropy, torch.float64)
    baseline = run(linear_token_logprobs_and_entropy, torch.bfloat16, impl="torch")
    got = run(linear_token_logprobs_and_entropy, torch.bfloat16, impl="triton")
    for x, want, own in zip(got, oracle, baseline, strict=True):
        assert_within_error_budget(x, want, own, factor=3.0)


def test_loss_in_bfloat16_near_that_in_torch() -> None:
    x = torch.randn(N, 8).bfloat16(), torch.randn(V, 8).bfloat16(), torch.randint(V, (N,))
    constants = (torch.randn(N) - 4, torch.randn(N), torch.ones(N).bool())
    numbers = []
    for impl in ("torch", "triton"):
        result = linear_ppo_loss(*x, *constants, entropy_coef=0.1, impl=impl)
        numbers.append(torch.stack([result.loss, *result.policy, result.entropy]))
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-4, atol=1e-5)
