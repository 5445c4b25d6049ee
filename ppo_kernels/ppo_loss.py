"""Policy loss and value loss together."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_clip,
    check_finite,
    check_floating,
    check_positive,
    check_same_device,
    check_shape,
    check_weights,
)
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl
from ppo_kernels.outputs import PolicyLoss, PPOLoss, ValueLoss


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 0.1,
    impl: str = "auto",
) -> PPOLoss:
    """Compute the policy loss and the value loss of a shared network.

    L = L_policy + c_vf·L_value, with the terms of `policy_loss` and `value_loss`

    Args:
        logprobs: any shape, floating: log π(a_t) under the policy that learns.
        old_logprobs: same shape: log π_old(a_t) of the rollout.
        advantages: same shape: Â_t.
        values: same shape: V(s_t) of the critic that learns.
        old_values: same shape: V(s_t) of the rollout.
        returns: same shape: R_t.
        weights: same shape: a bool mask, or floats from `token_weights`; see `policy_loss`.
        cliprange: ε in (0, 1).
        cliprange_high: ε_high > 0. None: ε.
        dual_clip: c > 1. None: no dual clip.
        cliprange_value: ε_v > 0. None: no clipping of values.
        vf_coef: c_vf, finite.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        PPOLoss(loss, policy, value). Only `loss` has a gradient, to `logprobs` and `values`; the
        losses inside `policy` and `value` are detached numbers. Masked positions have no effect.

    Raises:
        ValueError, TypeError: As in `policy_loss` and `value_loss`, or `vf_coef` is not finite.

    Source: Schulman et al. 2017, eq. 9 (without the entropy), https://arxiv.org/abs/1707.06347.
    """
    check_clip(cliprange, cliprange_high, dual_clip)
    check_positive(cliprange_value=cliprange_value)
    check_finite(vf_coef=vf_coef)
    floats = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "values": values,
        "old_values": old_values,
        "returns": returns,
    }
    check_floating(logprobs=logprobs, **floats)
    check_weights(weights)
    check_shape(logprobs.shape, "as logprobs", **floats, weights=weights)
    check_same_device(logprobs=logprobs, **floats, weights=weights)
    if resolve_impl(impl, logprobs, *floats.values()) is Impl.TRITON:
        from ppo_kernels._triton import losses as triton_losses

        high = cliprange if cliprange_high is None else cliprange_high
        new, old, a, v, v_old, target, w = as_2d(logprobs, *floats.values(), weights)
        clips = (cliprange, high, dual_clip, cliprange_value)
        loss, *parts = triton_losses.ppo_loss(new, old, a, v, v_old, target, w, *clips, vf_coef)
        return PPOLoss(loss, PolicyLoss(*parts[:6]), ValueLoss(*parts[6:]))
    return reference.ppo_loss(
        logprobs,
        old_logprobs,
        advantages,
        values,
        old_values,
        returns,
        weights,
        cliprange=cliprange,
        cliprange_high=cliprange_high,
        dual_clip=dual_clip,
        cliprange_value=cliprange_value,
        vf_coef=vf_coef,
    )
