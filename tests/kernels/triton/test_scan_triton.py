"""GAE and ppo_advantages in Triton, in the interpreter, in blocks so small that carries matter."""

from __future__ import annotations

import pytest
import torch

from ppo_kernels import reference
from ppo_kernels._triton import gae as triton_gae
from ppo_kernels._triton import tiling
from ppo_kernels.testing import assert_within_error_budget

LAMBDAS = [0.0, 0.1, 0.95, 1.0]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    tiles = {20: tiling.RowTile(4, 8, 1), 2048: tiling.RowTile(1, 32, 1)}
    monkeypatch.setattr(tiling, "ROW_TILES", tiles)
    monkeypatch.setattr(tiling, "LONG_ROW_TILE", tiles[2048])


def draw(n_rows, n_cols, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(5, n_rows, n_cols, generator=g).to(dtype)
    mask = torch.rand(n_rows, n_cols, generator=g) < 0.6
    scores, bootstrap = torch.randn(2, n_rows, generator=g).to(dtype)
    return *noise.unbind(), mask, scores, bootstrap


def double(*tensors):
    return [t.double() for t in tensors]


def test_worked_example_with_a_hole():
    """γ = 1/2, λ = 1/2, tokens 0, 1, 3 count: δ = (1+1−1, 2+2−2, 3+4−4) and Â from the right."""
    nan, mask = torch.nan, torch.tensor([[True, True, False, True]])
    rewards = torch.tensor([[1.0, 2.0, nan, 3.0]])
    values = torch.tensor([[1.0, 2.0, nan, 4.0]])
    advantages, returns = triton_gae.gae(rewards, values, mask, 0.5, 0.5, torch.tensor([8.0]))
    assert advantages.tolist() == [[1 + 2.75 / 4, 2 + 3 / 4, 0, 3]]
    assert returns.tolist() == [[2 + 2.75 / 4, 4.75, 0, 7]]


@pytest.mark.parametrize("gae_lambda", LAMBDAS)
@pytest.mark.parametrize("shape", [(5, 1), (3, 19), (2, 32), (3, 97)])
def test_within_twice_the_error_of_the_sequential_loop(shape, gae_lambda):
    rewards, values, _, _, _, mask, _, bootstrap = draw(*shape)
    values += 10
    options = {"gamma": 0.97, "gae_lambda": gae_lambda}
    ours = triton_gae.gae(rewards, values, mask, 0.97, gae_lambda, bootstrap)
    truth = reference.gae(
        *double(rewards, values), mask, bootstrap_values=bootstrap.double(), **options
    )
    loop = reference.gae(rewards, values, mask, bootstrap_values=bootstrap, **options)
    for got, want, baseline in zip(ours, truth, loop, strict=True):
        assert_within_error_budget(got, want, baseline)


@pytest.mark.parametrize("n_cols", [7, 32, 50])
def test_without_a_mask_every_token_counts(n_cols):
    rewards, values, *_, bootstrap = draw(3, n_cols)
    everywhere = torch.ones(3, n_cols, dtype=torch.bool)
    for boot in (None, bootstrap):
        ours = triton_gae.gae(rewards, values, None, 0.99, 0.9, boot)
        masked = triton_gae.gae(rewards, values, everywhere, 0.99, 0.9, boot)
        assert torch.equal(torch.stack(ours), torch.stack(masked))


def test_bootstrap_value_enters_once():
    """λ = 1 and V = 0: Â_0 is the discounted bootstrap value, over several blocks."""
    zeros, boot = torch.zeros(2, 70), torch.tensor([1.0, -3.0])
    advantages, _ = triton_gae.gae(zeros, zeros, None, 0.99, 1.0, boot)
    torch.testing.assert_close(advantages[:, 0], boot * 0.99**70, rtol=1e-5, atol=0)


def test_lambda_one_is_monte_carlo():
    rewards, values, *_ = draw(2, 70)
    _, returns = triton_gae.gae(rewards, values, None, 1.0, 1.0, None)
    sums = rewards.double().flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns.double(), sums, rtol=1e-5, atol=2e-5)


def test_a_hole_longer_than_a_block_is_skipped():
    rewards, values, *_, bootstrap = draw(2, 100)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    kept = [2, 3, 90]
    mask[:, kept] = True
    ours, _ = triton_gae.gae(rewards, values, mask, 0.9, 0.8, bootstrap)
    dense, _ = triton_gae.gae(rewards[:, kept], values[:, kept], None, 0.9, 0.8, bootstrap)
    torch.testing.assert_close(ours[:, kept], dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_masked_places_have_no_effect(poison):
    rewards, values, logprobs, ref, _, mask, scores, boot = draw(4, 45)
    mask[1] = False
    poisoned = [torch.where(mask, x, poison) for x in (rewards, values, logprobs, ref)]
    plain = triton_gae.gae(rewards, values, mask, 1.0, 0.95, boot)
    assert torch.equal(
        torch.stack(triton_gae.gae(*poisoned[:2], mask, 1.0, 0.95, boot)), torch.stack(plain)
    )
    assert not plain[0][~mask].any()
    assert not plain[1][~mask].any()
    rest = (values, mask, 0.1, "k3", 1.0, 0.95, boot)
    clean = triton_gae.ppo_advantages(scores, logprobs, ref, *rest)
    rest = (poisoned[1], *rest[1:])
    dirty = triton_gae.ppo_advantages(scores, poisoned[2], poisoned[3], *rest)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_nan_where_a_token_counts_reaches_all_that_depends_on_it():
    rewards, values, *_ = draw(2, 40)
    rewards[0, 20] = torch.nan
    advantages, _ = triton_gae.gae(rewards, values, None, 1.0, 0.95, None)
    assert advantages[0, :21].isnan().all()
    assert advantages[0, 21:].isfinite().all()
    assert advantages[1].isfinite().all()


@pytest.mark.parametrize("view", ["transposed", "column slice", "row slice", "expanded mask"])
def test_any_strides(view):
    rewards, values, _, _, _, mask, _, boot = draw(6, 37)
    if view == "transposed":
        changed = [x.t().contiguous().t() for x in (rewards, values, mask)]
    elif view == "column slice":
        changed = [torch.cat([x, x], 1)[:, 37:] for x in (rewards, values, mask)]
    elif view == "row slice":
        changed = [torch.stack([x, x], 1).flatten(0, 1)[::2] for x in (rewards, values, mask)]
    else:
        mask = mask[:1].expand(6, -1)
        changed = [rewards, values, mask]
    boot2 = torch.stack([boot, boot], 1)[:, 0]
    ours = triton_gae.gae(*changed, 1.0, 0.9, boot2)
    plain = triton_gae.gae(rewards, values, mask.contiguous(), 1.0, 0.9, boot)
    assert torch.equal(torch.stack(ours), torch.stack(plain))
    assert ours[0].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    rewards, values, _, _, _, mask, _, boot = draw(3, 33, dtype=dtype)
    ours = triton_gae.gae(rewards, values, mask, 0.9, 0.95, boot)
    widened = triton_gae.gae(rewards.float(), values.float(), mask, 0.9, 0.95, boot.float())
    assert ours[0].dtype == torch.float32
    assert torch.equal(torch.stack(ours), torch.stack(widened))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    rewards, values, logprobs, ref, _, mask, scores, boot = draw(*shape)
    advantages, returns = triton_gae.gae(rewards, values, mask, 1.0, 0.95, boot)
    assert advantages.shape == returns.shape == shape
    *_, moments = triton_gae.ppo_advantages(
        scores, logprobs, ref, values, mask, 0.1, "k1", 1.0, 0.95, None
    )
    assert moments.tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_ppo_advantages_is_its_three_parts(estimator, monkeypatch):
    monkeypatch.setattr(tiling, "SLOTS_PER_WARP", 2)  # 7 programs: four merges of two slots
    _, values, logprobs, ref, _, mask, scores, boot = draw(7, 41)
    mask[2] = False
    settings = {"kl_coef": 0.1, "estimator": estimator, "gamma": 0.98, "gae_lambda": 0.9}
    ours = triton_gae.ppo_advantages(
        scores, logprobs, ref, values, mask, *settings.values(), bootstrap_values=boot
    )
    inputs = (scores, logprobs, ref, values)
    truth = reference.ppo_advantages(
        *double(*inputs), mask, bootstrap_values=boot.double(), **settings
    )
    torch_fp32 = reference.ppo_advantages(*inputs, mask, bootstrap_values=boot, **settings)
    for got, want, baseline in zip(ours, truth, torch_fp32, strict=True):
        assert_within_error_budget(got, want, baseline)


def test_the_same_bits_every_time_and_the_ticket_returns_to_zero():
    _, values, logprobs, ref, _, mask, scores, _ = draw(9, 41)
    rest = (values, mask, 0.1, "k2", 1.0, 0.95, None)
    first, second = (triton_gae.ppo_advantages(scores, logprobs, ref, *rest) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert tiling.ticket(values.device).item() == 0


def test_offsets_beyond_32_bits(monkeypatch):
    """Row 2 starts at 2³¹, a product of two 32-bit numbers, in memory that is hardly touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    rewards, values, _, _, _, mask, _, boot = draw(3, 5)
    far = [torch.empty_strided((3, 5), (2**30, 1), dtype=torch.bfloat16) for _ in range(2)]
    for x, y in zip(far, (rewards, values), strict=True):
        x.copy_(y)
    ours = triton_gae.gae(*far, mask, 1.0, 0.95, boot)
    near = triton_gae.gae(*(x.contiguous() for x in far), mask, 1.0, 0.95, boot)
    assert torch.equal(torch.stack(ours), torch.stack(near))


def test_new_shapes_compile_nothing_new():
    def variant(n_rows, n_cols):
        launch = tiling.row_tiling(torch.empty(n_rows, n_cols))
        return launch.shape, launch.num_warps

    assert variant(3, 100) == variant(64, 2000) == variant(1, 30000)


@pytest.mark.parametrize("op", ["gae", "ppo_advantages"])
def test_registration(op):
    rewards, values, logprobs, ref, _, mask, scores, boot = draw(2, 9)
    values.requires_grad_()
    inputs = {
        "gae": (rewards, values, mask, 1.0, 0.95, boot),
        "ppo_advantages": (scores, logprobs, ref, values, mask, 0.1, "k1", 1.0, 0.95, None),
    }[op]
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.library.opcheck(getattr(torch.ops.ppo_kernels, op), detached)
    eager = getattr(triton_gae, op)(*inputs)
    compiled = torch.compile(getattr(triton_gae, op), fullgraph=True, backend="aot_eager")(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert not any(x.requires_grad for x in (*eager, *compiled))
