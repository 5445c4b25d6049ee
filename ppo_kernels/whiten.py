"""Whitening: zero mean and unit variance over the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_bool,
    check_finite,
    check_floating,
    check_same_device,
    check_shape,
)
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    moments: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Scale to unit variance, and shift to zero mean, over the tokens that count.

    y = (x − μ) / sqrt(σ² + ε),  σ² = M₂ / max(n − 1, 1);  with shift_mean=False: y + μ

    Args:
        x: any shape, floating; advantages or rewards.
        mask: same shape, bool, True = the token counts.
        shift_mean: False adds the mean back (it scales deviations only).
        eps: ε ≥ 0, finite.
        moments: [3] from `masked_moments` or `combine_moments`: n, μ, M₂ to use in place of x's
            own, so that all ranks and micro-batches whiten alike. None: x's own.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        Same shape, float32 (float64 for float64 x), without gradient. Masked positions are 0,
        whatever they hold. One token, or equal ones, give 0 (the mean when shift_mean=False).

    Raises:
        ValueError: Shapes differ, or `eps` is negative or not finite.
        TypeError: A dtype is wrong.

    Source: the `whiten` of Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593), in
    https://github.com/openai/lm-human-preferences, here masked and with n − 1.
    """
    check_floating(x=x, moments=moments)
    check_bool(mask=mask)
    check_shape(x.shape, "as x", mask=mask)
    check_shape(torch.Size([3]), "n, mean, M2", moments=moments)
    check_same_device(x=x, mask=mask, moments=moments)
    check_finite(eps=eps)
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    if resolve_impl(impl, x) is Impl.TRITON:
        from ppo_kernels._triton import whiten as triton_whiten

        rows, row_mask = as_2d(x, mask)
        whitened = triton_whiten.whiten(rows, row_mask, shift_mean, eps, moments)
        return whitened.view(x.shape)
    return reference.whiten(x, mask, shift_mean=shift_mean, eps=eps, moments=moments)
