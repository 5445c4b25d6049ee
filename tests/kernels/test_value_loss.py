"""The clipped value loss."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import value_loss
from ppo_kernels.testing import assert_within_error_budget

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def one(value, old_value, target, impl, **options):
    """Loss and dV of one token."""
    values = torch.tensor([value], requires_grad=True)
    got = value_loss(
        values,
        torch.tensor([old_value]),
        torch.tensor([target]),
        torch.tensor([True]),
        impl=impl,
        **options,
    )
    return got.loss.item(), torch.autograd.grad(got.loss, values)[0].item()


@pytest.mark.parametrize(
    ("value", "old_value", "target", "loss", "grad"),
    [
        (1.0, 0.0, 2.0, 1.62, 0.0),  # ray#19291: the larger of the two errors, ½·1.8²
        (1.0, 0.0, 0.1, 0.405, 0.9),
        (-1.0, 0.0, -2.0, 1.62, 0.0),
        (0.1, 0.0, 1.0, 0.405, -0.9),  # inside the range there is nothing to clip
        (5.0, 5.0, 2.0, 4.5, 3.0),
    ],
)
def test_one_token_on_paper(impl, value, old_value, target, loss, grad):
    assert_close(one(value, old_value, target, impl), (loss, grad), **CLOSE)


def test_without_clipping_it_is_half_the_squared_error(impl):
    assert_close(one(1.0, 0.0, 2.0, impl, cliprange_value=None), (0.5, -1.0), **CLOSE)


def test_clipfrac_on_paper(impl):
    # RLinf#1529: padding does not count, the clipped error has to be the larger one
    values = torch.tensor([1.0, 0.1, 5.0])
    got = value_loss(
        values,
        torch.zeros(3),
        torch.full((3,), 2.0),
        torch.tensor([True, True, False]),
        impl=impl,
    )
    assert got.clipfrac.item() == 0.5
    assert got.count.item() == 2


def test_rounding_is_not_taken_for_clipping(impl):
    # V_old + (V − V_old) is not V in float32; a move inside the range must not look clipped
    old_values, values = torch.rand(1000) / 8, torch.rand(1000) / 4096
    assert (old_values + (values - old_values) != values).any()
    got = value_loss(values, old_values, torch.randn(1000), torch.ones(1000), impl=impl)
    assert got.clipfrac.item() == 0


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_float", [False, True])
def test_masked_places_have_no_effect(impl, rubbish, as_float):
    values = torch.tensor([1.0, rubbish]).requires_grad_()
    other, target = torch.tensor([0.0, rubbish]), torch.tensor([0.1, rubbish])
    mask = torch.tensor([True, False])
    got = value_loss(values, other, target, mask.float() if as_float else mask, impl=impl)
    assert_close(got.loss.item(), 0.405, **CLOSE)
    assert (got.clipfrac.item(), got.count.item()) == (0, 1)
    (grad,) = torch.autograd.grad(got.loss, values)
    assert_close(grad, torch.tensor([0.9, 0]), **CLOSE)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_where_a_token_counts_stays(impl, which):
    inputs = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    inputs[which][1] = math.nan
    assert value_loss(*inputs, torch.ones(2), impl=impl).loss.isnan()


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_counts(impl, shape):
    values = torch.randn(shape, requires_grad=True)
    weights = torch.zeros(shape, dtype=torch.bool)
    got = value_loss(values, torch.randn(shape), torch.randn(shape), weights, impl=impl)
    assert [x.item() for x in got] == [0, 0, 0]
    (grad,) = torch.autograd.grad(got.loss, values)
    assert torch.equal(grad, torch.zeros(shape))


@pytest.mark.parametrize("cliprange_value", [None, 0.2, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_within_budget(impl, cliprange_value, dtype):
    inputs = [torch.randn(7, 300).to(dtype) for _ in range(3)]
    weights = torch.rand(7, 300) * (torch.rand(7, 300) < 0.7) / 1000

    def run(impl, to):
        values, *others = (x.to(to) for x in inputs)
        values.requires_grad_()
        got = value_loss(values, *others, weights, cliprange_value=cliprange_value, impl=impl)
        return *got, torch.autograd.grad(got.loss, values)[0]

    results = run(impl, dtype), run("reference", torch.float64), run("reference", dtype)
    for got, truth, own in zip(*results, strict=True):
        assert_within_error_budget(got, truth, own)


def test_gradcheck_of_the_reference():
    values, old_values, returns = torch.randn(3, 40, dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda v: value_loss(v, old_values, returns, torch.ones(40), impl="reference").loss,
        values.requires_grad_(),
    )


def test_only_values_get_a_gradient(impl):
    constants = [torch.randn(4).requires_grad_() for _ in range(3)]
    assert not value_loss(torch.randn(4), *constants, impl=impl).loss.requires_grad
    got = value_loss(torch.randn(4, requires_grad=True), *constants, impl=impl)
    assert [x.requires_grad for x in got] == [True, False, False]


def test_any_strides(impl):
    inputs = torch.randn(3, 30, 8).mT.unbind()
    mask = torch.rand(30, 8).T < 0.7
    got = value_loss(*inputs, mask, impl=impl)
    want = value_loss(*(x.contiguous() for x in inputs), mask.contiguous(), impl=impl)
    assert_close(tuple(got), tuple(want), **CLOSE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"cliprange_value": 0.0},
            ValueError,
            "cliprange_value must be positive and finite, got 0.0",
        ),
        (
            {"returns": torch.ones(3)},
            ValueError,
            "returns must have shape [2] (as values), got [3]",
        ),
        (
            {"old_values": torch.ones(2, dtype=torch.bool)},
            TypeError,
            "old_values must be a floating-point tensor, got torch.bool",
        ),
    ],
)
def test_refusals(change, error, message):
    names = ("values", "old_values", "returns", "weights")
    arguments = {name: torch.ones(2) for name in names} | change
    with pytest.raises(error) as caught:
        value_loss(**arguments)
    assert str(caught.value) == message
