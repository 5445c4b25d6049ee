"""The clipped policy loss of PPO."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_clip,
    check_floating,
    check_same_device,
    check_shape,
    check_weights,
)
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl
from ppo_kernels.outputs import PolicyLoss


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    impl: str = "auto",
) -> PolicyLoss:
    """Compute the clipped surrogate loss and its metrics.

    ρ_t = exp(log π(a_t) − log π_old(a_t)),
    L = Σ_t w_t·max(−Â_t·ρ_t, −Â_t·clip(ρ_t, 1−ε, 1+ε_high)),
    with dual clip c: min(·, c·|Â_t|) where Â_t < 0

    The exponent is capped at 40 so that ρ² fits in float32; the gradient goes on beyond it.

    Args:
        logprobs: any shape, floating: log π(a_t) under the policy that learns.
        old_logprobs: same shape: log π_old(a_t) under the policy of the rollout.
        advantages: same shape: Â_t.
        weights: same shape. bool: True = the token counts, w = 1/count of this call. Floating:
            w itself, as from `token_weights`; 0 = the token does not count.
        cliprange: ε in (0, 1).
        cliprange_high: ε_high > 0. None: ε.
        dual_clip: c > 1. None: no dual clip.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        PolicyLoss of 0-dim tensors, float32 (float64 when an argument is). `loss` has a gradient
        to `logprobs` only. The others are detached means over the `count` tokens that count,
        whatever their weights: `clipfrac`, the share where the clipped branch binds; `approx_kl`,
        mean of ρ − 1 − log ρ ≥ 0; `ratio_mean` and `ratio_var` of ρ. Masked positions have no
        effect, whatever they hold; if nothing counts, all is 0. NaN where a token counts stays.

    Raises:
        ValueError: Shapes differ, or a clip width is outside its range.
        TypeError: A dtype is wrong.

    Source: Schulman et al. 2017, eq. 7, https://arxiv.org/abs/1707.06347; dual clip: Ye et al.
    2020, eq. 5, https://arxiv.org/abs/1912.09729; ε_high: Yu et al. 2025, eq. 10,
    https://arxiv.org/abs/2503.14476.
    """
    check_clip(cliprange, cliprange_high, dual_clip)
    check_floating(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    check_weights(weights)
    others = {"old_logprobs": old_logprobs, "advantages": advantages, "weights": weights}
    check_shape(logprobs.shape, "as logprobs", **others)
    check_same_device(logprobs=logprobs, **others)
    if resolve_impl(impl, logprobs, old_logprobs, advantages) is Impl.TRITON:
        from ppo_kernels._triton import losses as triton_losses

        high = cliprange if cliprange_high is None else cliprange_high
        new, old, a, w = as_2d(logprobs, old_logprobs, advantages, weights)
        return PolicyLoss(*triton_losses.policy_loss(new, old, a, w, cliprange, high, dual_clip))
    return reference.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        weights,
        cliprange=cliprange,
        cliprange_high=cliprange_high,
        dual_clip=dual_clip,
    )
