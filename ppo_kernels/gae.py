"""Generalized advantage estimation over the tokens of responses."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_2d,
    check_bool,
    check_floating,
    check_same_device,
    check_shape,
    check_unit_interval,
)
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._torch import gae as torch_gae


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_values: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Estimate advantages, and the returns that the value function learns from.

    δ_t = r_t + γ·V(s_{t+1}) − V(s_t),  Â_t = δ_t + γλ·Â_{t+1},  R_t = Â_t + V(s_t)

    Only tokens that count exist: t+1 is the next one of them, across any hole in the mask. After
    the last one, Â is 0 and V(s_{t+1}) is the row's bootstrap value.

    Args:
        rewards: [B, T] floating, r_t.
        values: [B, T] floating, V(s_t): before token t is chosen.
        response_mask: [B, T] bool, True = the token counts. None: all.
        gamma: γ in [0, 1].
        gae_lambda: λ in [0, 1]. 1 gives Monte Carlo returns, 0 gives Â = δ.
        bootstrap_values: [B] floating, V after the last token, for responses cut off by a length
            limit. None: 0, for responses that ended by themselves.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        (advantages, returns), each [B, T] float32 (float64 when an argument is), without
        gradient. Masked positions are 0 in both, whatever they hold. Advantages are not whitened.

    Raises:
        ValueError: A shape is wrong, or `gamma` or `gae_lambda` is outside [0, 1].
        TypeError: A dtype is wrong.

    Source: Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eqs. 11 and 16, https://arxiv.org/abs/1506.02438.
    """
    check_unit_interval(gamma=gamma, gae_lambda=gae_lambda)
    check_floating(rewards=rewards, values=values, bootstrap_values=bootstrap_values)
    check_bool(response_mask=response_mask)
    check_2d(rewards=rewards)
    check_shape(rewards.shape, "as rewards", values=values, response_mask=response_mask)
    check_shape(rewards.shape[:1], "the batch of rewards", bootstrap_values=bootstrap_values)
    check_same_device(
        rewards=rewards,
        values=values,
        response_mask=response_mask,
        bootstrap_values=bootstrap_values,
    )
    chosen = resolve_impl(impl, rewards, values, bootstrap_values)
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import gae as triton_gae

        return triton_gae.gae(rewards, values, response_mask, gamma, gae_lambda, bootstrap_values)
    if chosen is Impl.TORCH:
        return torch_gae.gae(rewards, values, response_mask, gamma, gae_lambda, bootstrap_values)
    return reference.gae(
        rewards,
        values,
        response_mask,
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=bootstrap_values,
    )
