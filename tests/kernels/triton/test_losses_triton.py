"""The clipped losses in Triton, in the interpreter, in small tiles and several programs."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_kernels import reference
from ppo_kernels._triton import losses, tiling
from ppo_kernels.testing import assert_within_error_budget

CLIPS = [(None, None), (None, 0.2), (1.5, 0.2)]  # (dual_clip, cliprange_value)
SHAPES = [(1, 1), (3, 7), (7, 64), (13, 53)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    shapes = [(1, 64), (1, 32), (4, 16), (2, 32)]
    monkeypatch.setattr(tiling, "TILES", dict(zip(tiling.TILES, shapes, strict=True)))
    monkeypatch.setattr(tiling, "SLOTS_PER_WARP", 1)  # four slots at a time
    monkeypatch.setattr(losses, "MAX_PROGRAMS", 6)


def draw(n_rows, n_cols, seed=0, dtype=torch.float32):
    """logprobs, old, advantages, values, old values, returns, mask, float weights."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(6, n_rows, n_cols, generator=g)
    x[0] = x[1] + 0.4 * x[0]
    x[3] = x[4] + 0.3 * x[3]
    mask = torch.rand(n_rows, n_cols, generator=g) < 0.7
    weights = torch.where(mask, torch.rand(n_rows, n_cols, generator=g), 0) / mask.sum()
    return [*x.to(dtype).unbind(), mask, weights]


def ours(inputs, dual_clip=None, cliprange_value=0.2):
    return losses.ppo_loss(*inputs, 0.2, 0.3, dual_clip, cliprange_value, 0.5)


def specified(inputs, dual_clip=None, cliprange_value=0.2):
    clip = {"cliprange": 0.2, "cliprange_high": 0.3, "dual_clip": dual_clip}
    out = reference.ppo_loss(*inputs, cliprange_value=cliprange_value, vf_coef=0.5, **clip)
    return (out.loss, *out.policy, *out.value)


def leaves(inputs, dtype=None):
    copies = [x.detach().clone() for x in inputs]
    if dtype is not None:
        copies = [x.to(dtype) if x.is_floating_point() else x for x in copies]
    for i in (0, 3):
        copies[i].requires_grad_()
    return copies


def with_gradients(f, inputs, upstream=-1.7, **clip):
    out = f(inputs, **clip)
    (out[0] * upstream).backward()
    return [*out, inputs[0].grad, inputs[3].grad]


def test_worked_example():
    """Two tokens count: ρ = (2, 1/2), Â = (1, −1), ε = 0.2; V = (1, 0), V_old = 0, R = (3, 1)."""
    nan, mask = math.nan, torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[math.log(2), -math.log(2), nan]], requires_grad=True)
    values = torch.tensor([[1.0, 0.0, nan]], requires_grad=True)
    advantages, returns = torch.tensor([[1.0, -1.0, nan]]), torch.tensor([[3.0, 1.0, nan]])
    old = torch.tensor([[0.0, 0.0, nan]])
    out = losses.ppo_loss(
        logprobs, old, advantages, values, old, returns, mask, 0.2, 0.2, None, 0.2, 0.1
    )
    out[0].backward()
    policy, value = (-1.2 + 0.8) / 2, 0.5 * (2.8**2 + 1) / 2
    k3 = (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2
    want = [policy + 0.1 * value, policy, 1.0, k3, 1.25, 0.75**2, 2.0, value, 0.5, 2.0]
    torch.testing.assert_close(torch.stack(out).tolist(), want, rtol=1e-6, atol=1e-6)
    assert logprobs.grad.tolist() == [[0, 0, 0]]  # both are clipped on the losing side
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.05, 0.0]]))


@pytest.mark.parametrize("kind", ["mask", "floats"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_metrics_and_gradients(shape, clip, kind):
    *inputs, mask, weights = draw(*shape)
    inputs = [torch.where(mask, x, math.nan) for x in inputs]
    inputs.append(mask if kind == "mask" else weights)
    options = dict(zip(("dual_clip", "cliprange_value"), clip, strict=True))
    got = with_gradients(ours, leaves(inputs), **options)
    truth = with_gradients(specified, leaves(inputs, torch.float64), **options)
    torch_fp32 = with_gradients(specified, leaves(inputs), **options)
    for mine, want, baseline in zip(got, truth, torch_fp32, strict=True):
        # a sum of terms of either sign has the rounding error of its terms, whatever its own size
        tiny = 4e-7 * max(1.0, abs(want.item())) if want.ndim == 0 else None
        assert_within_error_budget(mine, want, baseline, tiny=tiny)
    assert not got[-1][~mask].any()
    assert not got[-2][~mask].any()


def test_each_half_alone_is_its_part_of_the_whole():
    lp, old, adv, v, v_old, ret, _, weights = leaves(draw(5, 31))
    whole = ours((lp, old, adv, v, v_old, ret, weights), dual_clip=1.5)
    policy = losses.policy_loss(lp, old, adv, weights, 0.2, 0.3, 1.5)
    value = losses.value_loss(v, v_old, ret, weights, 0.2)
    assert [x.item() for x in (*policy, *value)] == [x.item() for x in whole[1:]]
    (policy[0] + 0.5 * value[0]).backward()
    halves = [lp.grad.clone(), v.grad.clone()]
    lp.grad = v.grad = None
    whole[0].backward()
    assert torch.equal(lp.grad, halves[0])
    torch.testing.assert_close(v.grad, halves[1], rtol=1e-6, atol=0)
    assert not any(x.requires_grad for x in whole[1:])


def test_a_second_backward_pass_gives_the_same_gradient():
    *inputs, mask, _ = draw(3, 20)
    inputs = leaves([*inputs, mask])
    loss = ours(inputs)[0]
    first = torch.autograd.grad(loss, [inputs[0], inputs[3]], torch.tensor(2.0), retain_graph=True)
    again = torch.autograd.grad(loss, [inputs[0], inputs[3]], torch.tensor(2.0))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_only_wanted_gradients_are_stored():
    *inputs, mask, _ = draw(2, 9)
    lp, old, adv, v, v_old, ret = inputs

    def stored(*wanted):
        constants = (old, adv, v_old, ret, mask, 0.2, 0.2, 2.0, 0.2, 0.1)
        return losses._launch_clipped_losses(lp, v, *constants, *wanted)[2].shape[0]

    assert [stored(False, False), stored(True, False), stored(True, True)] == [0, 1, 2]
    frozen = leaves([*inputs, mask])
    frozen[0].requires_grad_(False)
    ours(frozen)[0].backward()
    both = leaves([*inputs, mask])
    ours(both)[0].backward()
    assert torch.equal(frozen[3].grad, both[3].grad)
    with torch.no_grad():
        assert not ours(leaves([*inputs, mask]))[0].requires_grad


@pytest.mark.parametrize("kind", ["mask", "floats"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 5)])
def test_nothing_counts(shape, kind):
    *inputs, mask, weights = draw(*shape)
    inputs = [torch.full_like(x, math.nan) for x in inputs]
    inputs.append(torch.zeros_like(mask if kind == "mask" else weights))
    inputs = leaves(inputs)
    out = with_gradients(ours, inputs)
    assert torch.stack(out[:-2]).tolist() == [0.0] * 10
    assert not out[-1].any()
    assert not out[-2].any()


@pytest.mark.parametrize("which", range(6))
def test_nan_where_a_token_counts_reaches_the_loss(which):
    inputs = draw(3, 7)[:-1]
    inputs[-1][1, 2] = True
    inputs[which][1, 2] = math.nan
    assert ours(inputs)[0].isnan()


@pytest.mark.parametrize(("log_ratio", "slope"), [(200.0, -math.exp(40)), (-200.0, 0.0)])
def test_extreme_ratios_stay_finite_and_keep_their_gradient(log_ratio, slope):
    logprobs = torch.full((1, 2), log_ratio, requires_grad=True)
    zeros, mask = torch.zeros(1, 2), torch.tensor([[True, False]])
    out = losses.policy_loss(logprobs, zeros, zeros - 1, mask, 0.2, 0.2, None)
    out[0].backward()
    assert torch.stack(out).isfinite().all()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-slope, 0.0]]), rtol=1e-5, atol=1e-30)


def test_large_ratios_keep_full_precision():
    """2^(ℓ·log₂ e), the exponential of a GPU, is off by ℓ roundings: 2e-6 at ℓ = 39."""
    logprobs = torch.linspace(1, 39, 100)[None].requires_grad_()
    zeros, mask = torch.zeros(1, 100), torch.ones(1, 100, dtype=torch.bool)
    losses.policy_loss(logprobs, zeros, zeros - 1, mask, 0.2, 0.2, None)[0].backward()
    ratio = 100 * logprobs.grad.double()
    torch.testing.assert_close(ratio, logprobs.detach().double().exp(), rtol=4e-7, atol=0)


def test_variance_of_ratios_near_one():
    """ρ = 1 ± 10⁻⁴: E[ρ²] − E[ρ]² in float32 would keep no digit of 10⁻⁸."""
    sign = torch.tensor([1.0, -1.0]).repeat(8, 100)
    zeros, mask = torch.zeros(8, 200), torch.ones(8, 200, dtype=torch.bool)
    *_, approx_kl, _, var, _ = losses.policy_loss(1e-4 * sign, zeros, zeros, mask, 0.2, 0.2, None)
    torch.testing.assert_close(var.item(), math.sinh(1e-4) ** 2, rtol=2e-3, atol=0)
    torch.testing.assert_close(approx_kl.item(), math.cosh(1e-4) - 1, rtol=1e-3, atol=0)


@pytest.mark.parametrize("view", ["transposed", "column slice", "expanded"])
def test_any_strides(view):
    inputs = draw(6, 37)[:-1]
    if view == "expanded":
        inputs = [x[:1].expand(6, -1) for x in inputs]
        changed = inputs
    elif view == "transposed":
        changed = [x.t().contiguous().t() for x in inputs]
    else:
        changed = [torch.cat([x, x], 1)[:, 37:] for x in inputs]
    got = with_gradients(
        ours, [x.detach().requires_grad_(i in (0, 3)) for i, x in enumerate(changed)]
    )
    want = with_gradients(ours, leaves([x.contiguous() for x in inputs]))
    for a, b in zip(got[:-2], want[:-2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert torch.equal(got[-1], want[-1])
    assert torch.equal(got[-2], want[-2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    inputs = draw(3, 33, dtype=dtype)[:-1]
    got = with_gradients(ours, leaves(inputs))
    want = with_gradients(ours, leaves(inputs, torch.float32))
    assert [x.item() for x in got[:-2]] == [x.item() for x in want[:-2]]
    assert got[-1].dtype == got[-2].dtype == dtype
    assert torch.equal(got[-1], want[-1].to(dtype))


def test_weights_add_up_over_micro_batches():
    inputs = draw(6, 20)
    weights = inputs.pop(6) / inputs[6].sum()
    inputs[6] = weights
    parts = [ours([x[rows] for x in inputs])[0] for rows in (slice(0, 1), slice(1, 6))]
    torch.testing.assert_close(sum(parts), ours(inputs)[0], rtol=1e-6, atol=1e-7)


def test_the_same_bits_every_time_and_the_ticket_returns_to_zero():
    inputs = draw(11, 70)[:-1]
    first, second = (with_gradients(ours, leaves(inputs)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert tiling.ticket(inputs[0].device).item() == 0


def test_a_second_derivative_is_refused():
    inputs = leaves(draw(2, 5)[:-1])
    with pytest.raises(RuntimeError, match="the loss can be differentiated once only"):
        torch.autograd.grad(ours(inputs)[0], inputs[0], create_graph=True)


@pytest.mark.parametrize("kind", ["mask", "floats"])
def test_registration_and_full_graph(kind):
    *inputs, mask, weights = draw(2, 9)
    inputs = leaves([*inputs, mask if kind == "mask" else weights])
    lp, old, adv, v, v_old, ret, w = inputs
    arguments = (lp, v, old, adv, v_old, ret, w, 0.2, 0.3, 2.0, 0.2, 0.5, True, True)
    torch.library.opcheck(torch.ops.ppo_kernels.clipped_losses, arguments)
    eager = with_gradients(ours, leaves(inputs))
    graph = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled = with_gradients(graph, leaves(inputs))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
