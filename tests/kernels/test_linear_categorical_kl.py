"""The exact KL of two heads, from hidden states."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import reference
from ppo_kernels.linear_categorical_kl import linear_categorical_kl
from ppo_kernels.testing import assert_within_error_budget

N, D, V = 9, 6, 41
HEADS = [{"temperature": 0.7, "logit_scale": 0.5}, {"logit_softcap": 2.0, "logit_scale": 3.0}]


def sample():
    """hidden, weight, bias, and the same of a narrower reference."""
    policy = torch.randn(N, D), torch.randn(V, D), torch.randn(V)
    return policy, (torch.randn(N, 3), torch.randn(V, 3), torch.randn(V))


def run(operator, policy, ref, **options):
    leaves = [x.detach().clone().requires_grad_() for x in policy]
    kl = operator(*leaves[:2], *ref[:2], bias=leaves[2], ref_bias=ref[2], **options)
    up = torch.linspace(-1, 1, kl.numel()).view_as(kl).to(kl.dtype)
    return [kl, *torch.autograd.grad(kl, leaves, up)]


@pytest.mark.parametrize("chunk_bytes", [1, 4 * V * 4, None])
@pytest.mark.parametrize("head", HEADS, ids=["scale", "softcap"])
def test_as_exact_as_the_specification_in_float32(head, chunk_bytes, impl):
    policy, ref = sample()
    wide = [[x.double() for x in side] for side in (policy, ref)]
    oracle = run(reference.linear_categorical_kl, *wide, **head)
    baseline = run(reference.linear_categorical_kl, policy, ref, **head)
    results = run(linear_categorical_kl, policy, ref, chunk_bytes=chunk_bytes, impl=impl, **head)
    for got, want, own in zip(results, oracle, baseline, strict=True):
        assert_within_error_budget(got, want, own)


def test_worked_example(impl):
    # π = (.8, .2) against uniform: KL = ln 2 − H(.8, .2); d KL/db_0 = .8·(ln 1.6 − KL)
    weight, ones = torch.zeros(2, 1), torch.ones(1, 1)
    bias = torch.tensor([math.log(4), 0.0], requires_grad=True)
    kl = linear_categorical_kl(ones, weight, ones, weight, bias=bias, impl=impl)
    want = 0.8 * math.log(1.6) + 0.2 * math.log(0.4)
    assert_close(kl, torch.tensor([want]))
    (grad,) = torch.autograd.grad(kl, bias)
    assert_close(grad[0].item(), 0.8 * (math.log(1.6) - want))


def test_a_head_against_itself_is_exactly_0(impl):
    (hidden, weight, bias), _ = sample()
    got = run(linear_categorical_kl, (hidden, weight, bias), (hidden, weight, bias), impl=impl)
    assert (got[0] == 0).all()
    assert_close(got[1:], [torch.zeros_like(x) for x in got[1:]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_masked_positions_have_no_effect(rubbish, impl):
    policy, ref = sample()
    mask = torch.arange(N) % 3 != 1
    dirty = [(torch.where(mask[:, None], side[0], rubbish), *side[1:]) for side in (policy, ref)]
    options = {"response_mask": mask, "chunk_bytes": 700}
    got = run(linear_categorical_kl, *dirty, **options, impl=impl)
    want = run(linear_categorical_kl, policy, ref, **options, impl="reference")
    assert_close(got, want, rtol=1e-5, atol=3e-6)
    assert (got[0][~mask] == 0).all()
    assert (got[1][~mask] == 0).all()


def test_nothing_counts(impl):
    policy, ref = sample()
    none = torch.zeros(N, dtype=torch.bool)
    assert all((x == 0).all() for x in run(linear_categorical_kl, policy, ref,
                                           response_mask=none, impl=impl))  # fmt: skip
    empty = [(side[0][:0], *side[1:]) for side in (policy, ref)]
    assert all((x == 0).all() for x in run(linear_categorical_kl, *empty, impl=impl))


def test_reference_gets_no_gradient(impl):
    policy, ref = sample()
    leaves = [x.requires_grad_() for x in ref]
    kl = linear_categorical_kl(
        policy[0].requires_grad_(), policy[1], *leaves[:2], ref_bias=leaves[2], impl=impl
    )
    kl.sum().backward()
    assert [x.grad for x in leaves] == [None] * 3


def test_reference_bans_a_column(impl):
    policy, ref = sample()
    ref[2][5] = -math.inf
    got = run(linear_categorical_kl, policy, ref, impl=impl)
    assert (got[0] == math.inf).all()
    assert impl == "reference" or all(x.isfinite().all() for x in got[1:])
    policy[2][5] = -math.inf  # the policy bans it too: adds 0
    got = run(linear_categorical_kl, policy, ref, impl=impl)
    want = run(linear_categorical_kl, policy, ref, impl="reference")
    assert_close(got[:3], want[:3], rtol=1e-5, atol=3e-6)


def test_gradcheck():
    policy, ref = sample()
    leaves = [x.double().requires_grad_() for x in policy]
    ref = [x.double() for x in ref]

    def operator(hidden, weight, bias):
        return linear_categorical_kl(hidden, weight, *ref[:2], bias=bias, chunk_bytes=V * 8 * 4)

    torch.autograd.gradcheck(operator, leaves)
