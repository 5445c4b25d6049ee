"""Strides, alignment, autograd and registration of the Triton kernels over logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppo_kernels._triton import logits as ops
from ppo_kernels._triton.logits_launch import same_phase

V = 601


def run(z: Tensor, r: Tensor, a: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """The statistics, and the gradient of the sum of those that have one."""
    z = z.detach().requires_grad_()
    both = ops.token_statistics(z, r, a, 0.9, z.shape[-1], mask)
    return [*both, *torch.autograd.grad(sum(x.sum() for x in both[:3]), z)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    """Equal but for rounding: where a row starts decides which lane adds up which columns."""
    for x, y in zip(got, want, strict=True):
        tolerance = 2e-5 if x.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(x, y, rtol=tolerance, atol=2e-5)


def logprobs(z: Tensor, a: Tensor, *, inplace: bool = False) -> Tensor:
    return ops.token_logprobs(z, a, 1.0, z.shape[-1], None, inplace)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "prefix of the sequence": lambda: torch.randn(2, 4, V)[:, :-1],
    "padded columns": lambda: torch.randn(2, 3, V + 39)[..., :V],
    "rows out of phase": lambda: torch.randn(2 * 3 * V + 1)[1:].view(2, 3, V),
    "sequence first": lambda: torch.randn(3, 2, V).transpose(0, 1),
    "columns first": lambda: torch.randn(V, 2, 3).permute(1, 2, 0),
    "every second column": lambda: torch.randn(2, 3, 2 * V)[..., ::2],
    "expanded": lambda: torch.randn(2, 1, V).expand(2, 3, V),
    "four dimensions": lambda: torch.randn(2, 1, 3, V),
    "four that do not merge": lambda: torch.randn(3, 2, 2, V).transpose(0, 1)[:, :, :1],
    "one row": lambda: torch.randn(V),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ref_is_contiguous", [True, False])
def test_any_strides(layout: str, ref_is_contiguous: bool) -> None:
    z, r = LAYOUTS[layout](), LAYOUTS[layout]()
    a = torch.randint(V, (*z.shape[:-1], 2))[..., 1]  # strided as well
    want = run(z.contiguous(), r.contiguous(), a.contiguous())
    assert_same(run(z, r.contiguous() if ref_is_contiguous else r, a), want)


def test_bfloat16_rows_that_start_anywhere() -> None:
    z, r = torch.randn(2, 3 * V).bfloat16()
    a = torch.randint(V, (3,))
    want = run(z.view(3, V), r.view(3, V), a)
    for shift in range(1, 8):
        moved = (torch.cat([x.new_zeros(shift), x])[shift:].view(3, V) for x in (z, r))
        assert_same(run(*moved, a), want)


def test_alignment_is_promised_only_where_every_row_has_it() -> None:
    """The interpreter takes any address; on a GPU a promise that is not kept is a fault."""
    buffer = torch.empty(2, 6 * 608 + 16, dtype=torch.bfloat16)
    z, odd = buffer[0, : 6 * 608].view(1, 6, 608), buffer[0, : 6 * V].view(1, 6, V)
    assert same_phase(z, buffer[1, : 6 * 608].view(1, 6, 608))
    assert same_phase(z, buffer[1, 8 : 8 + 6 * 608].view(1, 6, 608))
    assert not same_phase(z, buffer[1, 4 : 4 + 6 * 608].view(1, 6, 608))
    assert same_phase(odd, buffer[1, : 6 * V].view(1, 6, V))
    assert not same_phase(odd, z)
    assert same_phase(odd[:, :1], z[:, :1])
    assert not same_phase(z, z.float())


def test_reference_of_another_dtype() -> None:
    z, r, a = torch.randn(4, V).bfloat16(), torch.randn(4, V), torch.randint(V, (4,))
    got, want = run(z, r, a), run(z.float(), r, a)
    assert_same(got[:4], want[:4])
    assert_same([got[4]], [want[4].bfloat16()])


def test_strided_mask() -> None:
    z, r, a = torch.randn(3, 4, V), torch.randn(3, 4, V), torch.randint(V, (3, 4))
    mask = (torch.rand(4, 3) < 0.5).t()
    assert_same(run(z, r, a, mask), run(z, r, a, mask.contiguous()))


@pytest.mark.parametrize(("length", "in_phase"), [(8, True), (2, False)])
def test_gradient_of_odd_rows_keeps_their_alignment(length: int, in_phase: bool) -> None:
    z = torch.randn(2, length, V)[:, :-1].requires_grad_()
    a = torch.zeros(2, length - 1, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(logprobs(z, a).sum(), z)
    assert (gradient.stride() == z.stride()) == in_phase  # not if half the memory were unused


@pytest.mark.parametrize("strides", [(2**31, 1), (1, 2**30)])
def test_offsets_beyond_int32(strides: tuple[int, int]) -> None:
    torch.use_deterministic_algorithms(False)  # memory that nobody touches costs nothing
    buffer = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    z = buffer.as_strided((2, 3), strides)
    z.copy_(torch.tensor([[0.5, -1, 2], [1, 3, -2]]))
    values = z.float()
    a = torch.tensor([2, 0])
    z.requires_grad_()
    got = logprobs(z, a)
    torch.testing.assert_close(got, values.log_softmax(-1)[[0, 1], a])
    (gradient,) = torch.autograd.grad(got.sum(), z)
    want = torch.nn.functional.one_hot(a, 3) - values.softmax(-1)
    torch.testing.assert_close(gradient.float(), want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("shape", [(0, 3, V), (2, 0, V), (0, V)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    z, a = torch.randn(shape), torch.zeros(shape[:-1], dtype=torch.int64)
    *results, gradient = run(z, z, a)
    assert all(x.shape == shape[:-1] for x in results)
    assert gradient.shape == shape
    assert ops.token_logprobs_and_entropy(z, a, 1.0, V, None, False)[1].shape == shape[:-1]


@pytest.mark.parametrize("unused", [0, 1])
def test_one_of_two_results_unused(unused: int) -> None:
    z, a = torch.randn(3, V, requires_grad=True), torch.randint(V, (3,))
    results = ops.token_logprobs_and_entropy(z, a, 1.0, V, None, False)
    weights = [torch.ones(3), torch.ones(3)]
    weights[unused] = torch.zeros(3)
    (want,) = torch.autograd.grad(results, z, tuple(weights), retain_graph=True)
    (got,) = torch.autograd.grad(results[1 - unused].sum(), z)
    torch.testing.assert_close(got, want)


def test_incoming_gradients_of_any_stride() -> None:
    z, r, a = torch.randn(2, 3, V), torch.randn(2, 3, V), torch.randint(V, (2, 3))
    z.requires_grad_()
    results = ops.token_statistics(z, r, a, 1.0, V, None)[:3]
    strided = torch.tensor(2.0).expand(2, 3), torch.randn(3, 2).t(), torch.randn(2, 6)[:, ::2]
    for i in range(3):
        g = strided[i:] + strided[:i]
        (got,) = torch.autograd.grad(results, z, g, retain_graph=True)
        dense = [x.contiguous() for x in g]
        (want,) = torch.autograd.grad(results, z, dense, retain_graph=True)
        assert torch.equal(got, want)


def test_incoming_gradient_of_a_dead_row_is_not_read() -> None:
    z, a = torch.randn(3, V, requires_grad=True), torch.tensor([1, -100, 2])
    g = torch.tensor([1.0, math.nan, 1.0])
    (gradient,) = torch.autograd.grad(logprobs(z, a), z, g)
    assert (gradient[1] == 0).all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_backward_overwrites_the_logits(dtype: torch.dtype) -> None:
    leaf, a = torch.randn(3, V, dtype=dtype, requires_grad=True), torch.tensor([1, -100, 600])
    (want,) = torch.autograd.grad(logprobs(leaf, a).sum(), leaf)
    z = leaf * 1
    (got,) = torch.autograd.grad(logprobs(z, a, inplace=True).sum(), z)
    assert torch.equal(got, want)
    assert got.data_ptr() == z.data_ptr()


def test_inplace_backward_through_a_view() -> None:
    leaf, a = torch.randn(2, 4, V, requires_grad=True), torch.randint(V, (2, 3))
    (want,) = torch.autograd.grad(logprobs(leaf[:, :-1], a).sum(), leaf)
    (got,) = torch.autograd.grad(logprobs((leaf * 1)[:, :-1], a, inplace=True).sum(), leaf)
    assert torch.equal(got, want)


def test_inplace_backward_twice_raises() -> None:
    z, a = torch.randn(3, V, requires_grad=True) * 1, torch.randint(V, (3,))
    loss = logprobs(z, a, inplace=True).sum()
    torch.autograd.grad(loss, z, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, z)


def test_inplace_backward_is_seen_by_other_consumers() -> None:
    leaf, a = torch.randn(3, V, requires_grad=True), torch.randint(V, (3,))
    z = leaf * 1
    loss = logprobs(z, a, inplace=True).sum()
    other = z.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_changed_before_backward_raise() -> None:
    z, a = torch.randn(3, V, requires_grad=True) * 1, torch.randint(V, (3,))
    loss = logprobs(z, a, inplace=True).sum()
    z.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_grad_nothing_is_kept_or_changed() -> None:
    z, a = torch.randn(3, V, requires_grad=True), torch.tensor([1, -100, 2])
    before = z.detach().clone()
    with torch.no_grad():
        assert logprobs(z * 1, a, inplace=True).grad_fn is None
        assert logprobs(z, a, inplace=True).grad_fn is None
    assert logprobs(z.detach(), a).grad_fn is None
    assert torch.equal(z.detach(), before)
    assert not ops.token_statistics(z, z, a, 1.0, V, None)[3].requires_grad


def test_second_derivative_raises() -> None:
    z, a = torch.randn(3, V, requires_grad=True), torch.randint(V, (3,))
    results = [logprobs(z, a), *ops.token_statistics(z, z.detach(), a, 1.0, V, None)[:3]]
    for x in results:
        (gradient,) = torch.autograd.grad(x.sum(), z, create_graph=True)
        with pytest.raises(RuntimeError, match="are differentiable once"):
            gradient.sum().backward()


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    z, r, a = torch.randn(7, 640), torch.randn(7, 640), torch.randint(640, (7,))
    whole = run(z, r, a)
    for i in range(7):
        alone = run(z[i : i + 1], r[i : i + 1], a[i : i + 1])
        assert all(torch.equal(x, y[i : i + 1]) for x, y in zip(alone, whole, strict=True))


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True])])
def test_registration(mask: Tensor | None) -> None:
    z, r, a = torch.randn(3, 40, requires_grad=True), torch.randn(3, 40), torch.randint(33, (3,))
    op = torch.ops.ppo_kernels
    stats, g = torch.rand(3, 6), torch.rand(3)
    for with_entropy in (False, True):
        torch.library.opcheck(op.token_logprobs, (z, a, 0.7, 33, mask, with_entropy))
    torch.library.opcheck(op.token_statistics, (z, r, a, 0.7, 33, mask))
    torch.library.opcheck(op.token_statistics, (z, r, None, 0.7, 33, mask))
    arguments = (z.detach(), r, a, 0.7, 33, mask, stats, g, None, g)
    torch.library.opcheck(op.logits_backward, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graph(dynamic: bool) -> None:
    def loss(z: Tensor, r: Tensor, a: Tensor) -> Tensor:
        z = z[:, :-1]
        one = ops.token_logprobs_and_entropy(z, a, 0.7, V, None, False)
        both = ops.token_statistics(z, r, a, 0.7, V, None)
        kl = ops.categorical_kl(z, r, 0.7, V, None)
        return (one[0] * logprobs(z, a) + one[1] * both[0] + both[1] * kl + both[2]).sum()

    z, r = torch.randn(2, 3, V, requires_grad=True), torch.randn(2, 2, V)
    a = torch.randint(V, (2, 2))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got, want = compiled(z, r, a), loss(z, r, a)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(x, z)[0] for x in (got, want)))
