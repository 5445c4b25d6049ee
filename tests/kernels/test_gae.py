"""Generalized advantage estimation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from ppo_kernels import gae
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def row(*numbers):
    """One sequence."""
    return torch.tensor([numbers], dtype=torch.float32)


def compacted(rewards, values, mask, **options):
    """GAE of each row without what does not count, spread back to its places: the truth."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    bootstrap = options.pop("bootstrap_values", None)
    for b in range(len(rewards)):
        m, last = mask[b], None if bootstrap is None else bootstrap[b : b + 1]
        a, r = gae(rewards[b, m][None], values[b, m][None], bootstrap_values=last, **options)
        advantages[b, m], returns[b, m] = a[0], r[0]
    return advantages, returns


@pytest.mark.parametrize("rubbish", [100.0, math.nan, math.inf])
def test_value_after_the_end_is_not_used(impl, rubbish):
    # ROLL#447
    mask = torch.tensor([[True, True, False]])
    advantages, returns = gae(row(0, 1, 0), row(0, 0, rubbish), mask, impl=impl)
    assert_close(advantages, row(0.95, 1, 0), **CLOSE)
    assert_close(returns, row(0.95, 1, 0), **CLOSE)


def test_ended_and_cut_off_responses(impl):
    # cleanrl#457
    options = {"gamma": 0.99, "gae_lambda": 0.95, "impl": impl}
    ended = gae(row(0, 1), row(0.5, 0.5), **options)
    assert_close(ended, (row(0.46525, 0.5), row(0.96525, 1)), **CLOSE)
    cut = gae(row(0, 1), row(0.5, 0.5), bootstrap_values=torch.tensor([0.7]), **options)
    assert_close(cut, (row(1.1170165, 1.193), row(1.6170165, 1.693)), **CLOSE)


def test_bootstrap_comes_after_the_last_token_that_counts(impl):
    mask = torch.tensor([[True, False, True, False]])
    got = gae(
        row(0, math.nan, 1, math.nan),
        row(0.5, math.inf, 0.5, -9),
        mask,
        gamma=0.99,
        bootstrap_values=torch.tensor([0.7]),
        impl=impl,
    )
    want = (row(1.1170165, 0, 1.193, 0), row(1.6170165, 0, 1.693, 0))
    assert_close(got, want, **CLOSE)


def test_lambda_one_is_monte_carlo(impl):
    rewards, values = torch.randn(2, 3, 40)
    bootstrap, discounts = torch.randn(3), 0.9 ** torch.arange(40.0)
    advantages, returns = gae(
        rewards, values, gamma=0.9, gae_lambda=1.0, bootstrap_values=bootstrap, impl=impl
    )
    for t in range(40):
        tail = (rewards[:, t:] * discounts[: 40 - t]).sum(1) + 0.9 ** (40 - t) * bootstrap
        assert_close(returns[:, t], tail, rtol=1e-4, atol=1e-5)
        assert_close(advantages[:, t], tail - values[:, t], rtol=1e-4, atol=1e-5)


def test_bootstrap_alone(impl):
    # rl-triton#4: counted twice; with λ = 1 and V = 0, Â_0 = γ^T · V_boot
    zero = torch.zeros(1, 7)
    advantages, _ = gae(
        zero, zero, gamma=0.9, gae_lambda=1.0, bootstrap_values=torch.ones(1), impl=impl
    )
    assert_close(advantages[0], 0.9 ** torch.arange(7.0, 0, -1), **CLOSE)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.0, 0.95), (0.97, 0.0)])
def test_no_decay_left_gives_the_td_error(impl, gamma, gae_lambda):
    rewards, values = torch.randn(2, 4, 20)
    advantages, _ = gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda, impl=impl)
    following = torch.cat([values[:, 1:], torch.zeros(4, 1)], 1)
    assert_close(advantages, rewards + gamma * following - values, **CLOSE)


def test_gamma_lambda_one_telescopes(impl):
    rewards, values = torch.randn(2, 2, 300)
    _, returns = gae(rewards, values, gamma=1.0, gae_lambda=1.0, impl=impl)
    assert_close(returns, rewards.flip(1).cumsum(1).flip(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.3])
def test_holes_are_skipped(impl, gae_lambda):
    rewards, values = torch.randn(2, 16, 70)
    mask, bootstrap = torch.rand(16, 70) < 0.6, torch.randn(16)
    mask[3] = False
    options = {"gamma": 0.99, "gae_lambda": gae_lambda, "bootstrap_values": bootstrap}
    got = gae(rewards, values, mask, impl=impl, **options)
    want = compacted(rewards, values, mask, impl="reference", **options)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got[0][~mask] == 0).all()
    assert (got[1][~mask] == 0).all()


def test_padding_on_either_side_changes_nothing(impl):
    rewards, values = torch.randn(2, 4, 33)
    want = gae(rewards, values, impl=impl)
    pad = torch.full((4, 40), math.nan)
    mask = torch.cat([pad > 0, rewards == rewards, pad > 0], 1)
    padded = gae(
        torch.cat([pad, rewards, pad], 1), torch.cat([pad, values, pad], 1), mask, impl=impl
    )
    for w, p in zip(want, padded, strict=True):
        assert_close(p[:, 40:73], w, rtol=0, atol=1e-5)
        assert (p[:, :40] == 0).all()
        assert (p[:, 73:] == 0).all()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257, 1000])
@pytest.mark.parametrize("holes", [False, True])
def test_within_budget_of_the_sequential_loop(impl, length, holes):
    rewards, values = torch.randn(2, 6, length)
    mask = torch.rand(6, length) < 0.7 if holes else None
    got = gae(rewards, values, mask, impl=impl)
    truth = gae(rewards.double(), values.double(), mask, impl="reference")
    own = gae(rewards, values, mask, impl="reference")
    for g, t, o in zip(got, truth, own, strict=True):
        assert_within_error_budget(g, t, o)


def test_very_long_rows_neither_underflow_nor_overflow(impl):
    # rl-triton#3: 0.9^4096 is 0 in float32 and its inverse inf
    rewards, values = torch.randn(2, 2, 4096)
    options = {"gamma": 0.95, "gae_lambda": 0.9}
    got, _ = gae(rewards, values, impl=impl, **options)
    truth, _ = gae(rewards.double(), values.double(), impl="reference", **options)
    assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


def test_one_long_and_many_short_rows(impl):
    # every row is alone, whatever piece of the batch it is computed in
    rewards, values = torch.randn(2, 700, 600)
    mask = torch.arange(600) < torch.randint(0, 601, (700, 1))
    whole, _ = gae(rewards, values, mask, impl="torch")
    for b in (0, 436, 437, 699):
        alone, _ = gae(rewards[b : b + 1], values[b : b + 1], mask[b : b + 1], impl=impl)
        assert_close(whole[b : b + 1], alone, rtol=0, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_any_mask_and_discount(bits, gamma, gae_lambda, with_bootstrap):
    torch.manual_seed(len(bits))
    rewards, values = torch.randn(2, 1, len(bits), dtype=torch.float64)
    mask = torch.tensor([bits])
    options = {"gamma": gamma, "gae_lambda": gae_lambda}
    if with_bootstrap:
        options["bootstrap_values"] = torch.randn(1, dtype=torch.float64)
    got = gae(rewards, values, mask, impl="torch", **options)
    assert_close(got, compacted(rewards, values, mask, impl="reference", **options))


def test_nan_where_a_token_counts_reaches_what_comes_before(impl):
    rewards = row(1, 1, math.nan, 1)
    advantages, _ = gae(rewards, torch.zeros(1, 4), impl=impl)
    assert advantages.isnan().tolist() == [[True, True, True, False]]


def test_precision_and_gradients(impl):
    rewards = torch.randn(2, 5).bfloat16().requires_grad_()
    got = gae(rewards, torch.randn(2, 5).bfloat16(), impl=impl)
    assert [x.dtype for x in got] == [torch.float32] * 2
    assert not got[0].requires_grad
    want = gae(rewards.float(), torch.zeros(2, 5).double(), impl="torch")
    assert want[0].dtype == torch.float64


def test_any_strides_same_bits_and_inputs_untouched(impl):
    rewards, values = torch.randn(2, 30, 8).mT.unbind()
    copies = rewards.clone(), values.clone()
    first, second = gae(rewards, values, impl=impl), gae(rewards, values, impl=impl)
    assert torch.equal(first[0], second[0])
    assert_close(first, gae(*(x.contiguous() for x in copies), impl=impl), rtol=0, atol=1e-6)
    assert torch.equal(rewards, copies[0])
    assert torch.equal(values, copies[1])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_empty(impl, shape, masked):
    x = torch.randn(shape)
    mask = torch.ones(shape, dtype=torch.bool) if masked else None
    got = gae(x, x, mask, bootstrap_values=torch.randn(shape[0]), impl=impl)
    assert [y.shape for y in got] == [shape, shape]


def test_compiles_without_graph_breaks(impl):
    rewards, values = torch.randn(2, 3, 9)
    mask = torch.rand(3, 9) < 0.7
    compiled = torch.compile(
        lambda r, v, m: gae(r, v, m, impl=impl), fullgraph=True, backend="eager"
    )
    assert_close(compiled(rewards, values, mask), gae(rewards, values, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gamma": 1.01}, ValueError, "gamma must be in [0, 1], got 1.01"),
        ({"gae_lambda": -0.1}, ValueError, "gae_lambda must be in [0, 1], got -0.1"),
        ({"gamma": math.nan}, ValueError, "gamma must be in [0, 1], got nan"),
        (
            {"values": torch.zeros(2, 4)},
            ValueError,
            "values must have shape [2, 3] (as rewards), got [2, 4]",
        ),
        ({"rewards": torch.zeros(6)}, ValueError, "rewards must have shape [B, T], got [6]"),
        (
            {"response_mask": torch.ones(2, 3)},
            TypeError,
            "response_mask must be bool (True = the token counts), got torch.float32",
        ),
        (
            {"bootstrap_values": torch.zeros(3)},
            ValueError,
            "bootstrap_values must have shape [2] (the batch of rewards), got [3]",
        ),
        (
            {"values": torch.zeros(2, 3, dtype=torch.int64)},
            TypeError,
            "values must be a floating-point tensor, got torch.int64",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3)} | change
    with pytest.raises(error) as caught:
        gae(**arguments)
    assert str(caught.value) == message
