"""From scores to advantages: token rewards, GAE and the moments for whitening."""

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
    check_unit_interval,
)
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._torch import gae as torch_gae
from ppo_kernels.kl_penalty import KL_ESTIMATORS
from ppo_kernels.outputs import PPOAdvantages


def ppo_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_values: Tensor | None = None,
    impl: str = "auto",
) -> PPOAdvantages:
    """Compute advantages and returns from scores, and the advantages' moments.

    r = token_rewards(s, log π, log π_ref; β),  (Â, R) = gae(r, V; γ, λ),
    (n, μ, M₂) = masked_moments(Â)

    Args:
        scores: [B] floating, s: what the reward model says of the whole response.
        logprobs: [B, T] floating: log π of the policy that sampled the tokens.
        ref_logprobs: [B, T] floating: log π_ref of the frozen reference.
        values: [B, T] floating, V(s_t).
        response_mask: [B, T] bool, True = the token counts. Holes are allowed.
        kl_coef: β, finite.
        estimator: "k1", "abs", "k2" or "k3"; see `kl_penalty`.
        gamma: γ in [0, 1].
        gae_lambda: λ in [0, 1].
        bootstrap_values: [B] floating, V after the last token. None: 0. See `gae`.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        PPOAdvantages(advantages [B, T], returns [B, T], moments [3]), float32 (float64 when an
        argument is), without gradient. Advantages are not whitened: pass `moments`, combined over
        ranks, to `whiten`. Masked positions are 0, whatever they hold.

    Raises:
        ValueError, TypeError: As in `token_rewards` and `gae`.

    Source: Ziegler et al. 2019, eq. 2, https://arxiv.org/abs/1909.08593; Schulman et al. 2015,
    eqs. 11 and 16, https://arxiv.org/abs/1506.02438.
    """
    check_one_of(KL_ESTIMATORS, estimator=estimator)
    check_finite(kl_coef=kl_coef)
    check_unit_interval(gamma=gamma, gae_lambda=gae_lambda)
    floats = {"ref_logprobs": ref_logprobs, "values": values}
    rows = {"scores": scores, "bootstrap_values": bootstrap_values}
    check_floating(logprobs=logprobs, **floats, **rows)
    check_bool(response_mask=response_mask)
    check_2d(logprobs=logprobs)
    check_shape(logprobs.shape, "as logprobs", **floats, response_mask=response_mask)
    check_shape(logprobs.shape[:1], "the batch of logprobs", **rows)
    check_same_device(logprobs=logprobs, **floats, **rows, response_mask=response_mask)
    chosen = resolve_impl(impl, logprobs, *floats.values(), *rows.values())
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import gae as triton_gae

        return PPOAdvantages(
            *triton_gae.ppo_advantages(
                scores,
                logprobs,
                ref_logprobs,
                values,
                response_mask,
                kl_coef,
                estimator,
                gamma,
                gae_lambda,
                bootstrap_values,
            )
        )
    if chosen is Impl.TORCH:
        rewards = reference.token_rewards(
            scores, logprobs, ref_logprobs, response_mask, kl_coef=kl_coef, estimator=estimator
        )
        advantages, returns = torch_gae.gae(
            rewards, values, response_mask, gamma, gae_lambda, bootstrap_values
        )
        moments = reference.masked_moments(advantages, response_mask)
        return PPOAdvantages(advantages, returns, moments)
    return reference.ppo_advantages(
        scores,
        logprobs,
        ref_logprobs,
        values,
        response_mask,
        kl_coef=kl_coef,
        estimator=estimator,
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=bootstrap_values,
    )
