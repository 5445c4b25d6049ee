"""Rewards per token: a KL penalty everywhere and the score at the end."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_2d,
    check_bool,
    check_finite,
    check_floating,
    check_one_of,
    check_same_device,
    check_shape,
)
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels.kl_penalty import KL_ESTIMATORS


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
    impl: str = "auto",
) -> Tensor:
    """Spread the scores of whole responses over tokens, with a KL penalty on each token.

    r_t = −β·kl_t + s·[t is the last token of the response that counts]

    Args:
        scores: [B] floating, s: what the reward model says of the whole response.
        logprobs: [B, T] floating: log π of the policy that sampled the tokens.
        ref_logprobs: [B, T] floating: log π_ref of the frozen reference.
        response_mask: [B, T] bool, True = the token counts. Holes are allowed.
        kl_coef: β, finite; a positive one keeps the policy near the reference.
        estimator: "k1", "abs", "k2" or "k3"; see `kl_penalty`.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        [B, T] float32 (float64 when an argument is), without gradient. Masked positions are 0,
        whatever they hold. A row without a token that counts loses its score.

    Raises:
        ValueError: A shape is wrong, `kl_coef` is not finite, or `estimator` is unknown.
        TypeError: A dtype is wrong.

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", eq. 2,
    https://arxiv.org/abs/1909.08593.
    """
    check_one_of(KL_ESTIMATORS, estimator=estimator)
    check_finite(kl_coef=kl_coef)
    check_floating(scores=scores, logprobs=logprobs, ref_logprobs=ref_logprobs)
    check_bool(response_mask=response_mask)
    check_2d(logprobs=logprobs)
    check_shape(
        logprobs.shape, "as logprobs", ref_logprobs=ref_logprobs, response_mask=response_mask
    )
    check_shape(logprobs.shape[:1], "the batch of logprobs", scores=scores)
    check_same_device(
        logprobs=logprobs, scores=scores, ref_logprobs=ref_logprobs, response_mask=response_mask
    )
    if resolve_impl(impl, logprobs, ref_logprobs, scores) is Impl.TRITON:
        from ppo_kernels._triton import rewards as triton_rewards

        return triton_rewards.token_rewards(
            scores, logprobs, ref_logprobs, response_mask, kl_coef, estimator
        )
    return reference.token_rewards(
        scores, logprobs, ref_logprobs, response_mask, kl_coef=kl_coef, estimator=estimator
    )
