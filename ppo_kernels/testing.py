"""An assertion for low-precision numerics, for the tests of this package and of others."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_within_error_budget(
    actual: Tensor,
    oracle64: Tensor,
    baseline: Tensor,
    *,
    factor: float = 2.0,
    tiny: float | None = None,
) -> None:
    """Assert that a result is about as near to the truth as PyTorch's own at the same precision.

    |actual − oracle64| ≤ factor·max|baseline − oracle64| + tiny, element by element. A tolerance
    that somebody chose by hand either hides a fault or fails on another machine; the baseline's
    own rounding error moves with the data.

    Args:
        actual: The result under test, any floating-point dtype, any shape.
        oracle64: The truth: the same computation in float64, on the same inputs.
        baseline: The same computation in plain PyTorch, at the precision of the inputs.
        factor: How many times the baseline's largest error is allowed.
        tiny: Allowed beyond that; default: four roundings (machine epsilon of `actual`) at the
            largest finite magnitude of the oracle, since the baseline may be exact by luck.

    Raises:
        AssertionError: Shapes differ, NaN or infinities are in different places, or the error is
            over the budget; the message says where and how much.
        TypeError: `oracle64` is not float64.
    """
    if oracle64.dtype != torch.float64:
        raise TypeError(f"oracle64 must be torch.float64, got {oracle64.dtype}")
    precision = torch.finfo(actual.dtype).eps
    actual, oracle, baseline = (
        t.detach().to("cpu", torch.float64) for t in (actual, oracle64, baseline)
    )
    for name, tensor in (("actual", actual), ("baseline", baseline)):
        if tensor.shape != oracle.shape:
            raise AssertionError(
                f"{name} has shape {list(tensor.shape)}, oracle64 {list(oracle.shape)}"
            )
    finite = oracle.isfinite()
    special = torch.where(finite, 0.0, oracle)
    _fail_where(
        torch.where(actual.isfinite(), 0.0, actual).ne(special)
        & ~(actual.isnan() & oracle.isnan()),
        "actual and oracle64 are not finite in the same places",
        actual,
        oracle,
    )
    if not finite.any():
        return
    if tiny is None:
        tiny = 4 * precision * oracle[finite].abs().max().item()
    both = finite & baseline.isfinite()
    own = (baseline - oracle)[both].abs().max().item() if both.any() else 0.0
    budget = factor * own + tiny
    _fail_where(
        finite & ((actual - oracle).abs() > budget),
        f"error over the budget {budget:.3e} = {factor:g} · {own:.3e} (baseline) + {tiny:.3e}",
        actual,
        oracle,
    )


def _fail_where(wrong: Tensor, what: str, actual: Tensor, oracle: Tensor) -> None:
    if not wrong.any():
        return
    error = (actual - oracle).abs().where(wrong, torch.tensor(-1.0, dtype=actual.dtype))
    at = [
        int(i) for i in torch.unravel_index(error.nan_to_num(nan=torch.inf).argmax(), wrong.shape)
    ]
    got, want = actual[tuple(at)].item(), oracle[tuple(at)].item()
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements, worst at {at}: "
        f"got {got!r}, want {want!r}, error {abs(got - want):.3e}"
    )
