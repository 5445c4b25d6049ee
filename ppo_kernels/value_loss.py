"""The clipped value loss of PPO."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_floating,
    check_positive,
    check_same_device,
    check_shape,
    check_weights,
)
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl
from ppo_kernels.outputs import ValueLoss


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    cliprange_value: float | None = 0.2,
    impl: str = "auto",
) -> ValueLoss:
    """Compute the squared error of the values, with moves away from the old ones clipped.

    V_clip = V_old + clip(V − V_old, −ε_v, ε_v),  L = ½·Σ_t w_t·max((V_t − R_t)², (V_clip − R_t)²)

    The larger error counts: a move that overshoots the clip range gets no gradient from it.

    Args:
        values: any shape, floating: V(s_t) of the critic that learns.
        old_values: same shape: V(s_t) of the rollout.
        returns: same shape: R_t.
        weights: same shape. bool: True = the token counts, w = 1/count of this call. Floating:
            w itself, as from `token_weights`; 0 = the token does not count.
        cliprange_value: ε_v > 0. None: no clipping.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        ValueLoss of 0-dim tensors, float32 (float64 when an argument is): `loss`, with a gradient
        to `values` only; `clipfrac`, the share of the `count` tokens that count where the
        clipped error is the larger. Masked positions have no effect, whatever they hold; if
        nothing counts, all is 0.

    Raises:
        ValueError: Shapes differ, or `cliprange_value` is not positive.
        TypeError: A dtype is wrong.

    Source: OpenAI Baselines, ppo2/model.py, https://github.com/openai/baselines (the clip is not
    in the paper); the ½ as there.
    """
    check_positive(cliprange_value=cliprange_value)
    check_floating(values=values, old_values=old_values, returns=returns)
    check_weights(weights)
    others = {"old_values": old_values, "returns": returns, "weights": weights}
    check_shape(values.shape, "as values", **others)
    check_same_device(values=values, **others)
    if resolve_impl(impl, values, old_values, returns) is Impl.TRITON:
        from ppo_kernels._triton import losses as triton_losses

        new, old, target, w = as_2d(values, old_values, returns, weights)
        return ValueLoss(*triton_losses.value_loss(new, old, target, w, cliprange_value))
    return reference.value_loss(
        values, old_values, returns, weights, cliprange_value=cliprange_value
    )
