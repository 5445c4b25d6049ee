"""Estimates of the KL divergence from the log-probabilities of the sampled tokens."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_bool,
    check_floating,
    check_one_of,
    check_same_device,
    check_shape,
)
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: str = "k1",
    response_mask: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Estimate KL(π‖π_ref) at each sampled token.

    With Δ = log π(a) − log π_ref(a):

    k1 = Δ,  abs = |Δ|,  k2 = ½·Δ²,  k3 = e^(−Δ) − 1 + Δ

    k1 and k3 are unbiased for a ~ π; k3 is never negative and varies less. As a *loss*, k2 is the
    one whose expected gradient is that of the KL (k1's is 0). Nothing is clamped short of the
    limit of float32: k3 takes e^min(−Δ, 88) and k2 min(|Δ|, 1.8e19), and their gradients go on
    from there. Near Δ = 0, k3 does not cancel.

    Args:
        logprobs: any shape, floating: log π(a), of the policy that sampled a.
        ref_logprobs: same shape: log π_ref(a).
        estimator: "k1", "abs", "k2" or "k3".
        response_mask: same shape, bool, True = the token counts. None: all.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        Same shape, float32 (float64 when an argument is), in nats; differentiable in both
        arguments. Masked positions are 0, with a zero gradient, whatever they hold.

    Raises:
        ValueError: Shapes differ, or `estimator` is unknown.
        TypeError: A dtype is wrong.

    Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    check_one_of(KL_ESTIMATORS, estimator=estimator)
    check_floating(logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_bool(response_mask=response_mask)
    check_shape(
        logprobs.shape, "as logprobs", ref_logprobs=ref_logprobs, response_mask=response_mask
    )
    check_same_device(logprobs=logprobs, ref_logprobs=ref_logprobs, response_mask=response_mask)
    if resolve_impl(impl, logprobs, ref_logprobs) is Impl.TRITON:
        from ppo_kernels._triton import rewards as triton_rewards

        a, b, mask = as_2d(logprobs, ref_logprobs, response_mask)
        return triton_rewards.kl_penalty(a, b, estimator, mask).view(logprobs.shape)
    return reference.kl_penalty(
        logprobs, ref_logprobs, estimator=estimator, response_mask=response_mask
    )
