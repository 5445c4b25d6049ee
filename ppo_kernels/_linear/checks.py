"""Checks that the operators over hidden states share."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels._checks import (
    check_bool,
    check_floating,
    check_positive,
    check_same_device,
    check_shape,
)
from ppo_kernels._linear.head import Settings


def matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matmuls: that of the inputs, or autocast's."""
    dtypes = (hidden.dtype, weight.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"weight must be {hidden.dtype} (the dtype of hidden) outside autocast, "
            f"got {weight.dtype}"
        )
    return hidden.dtype


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """Refuse hidden states, weight and bias that do not fit each other."""
    names = [prefix + name for name in ("hidden", "weight", "bias")]
    given = dict(zip(names, (hidden, weight, bias), strict=True))
    check_floating(**given)
    if weight.dim() != 2 or len(weight) < 1:
        raise ValueError(f"{names[1]} must have shape [V, D] with V > 0, got {list(weight.shape)}")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{names[0]} must have shape [..., {weight.shape[1]}] (D of {names[1]}), "
            f"got {list(hidden.shape)}"
        )
    check_shape(weight.shape[:1], f"V of {names[1]}", **{names[2]: bias})
    check_same_device(**given)


def check_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    **per_token: Tensor | None,
) -> Settings:
    """Check what the operators share; return how the head is to be computed."""
    check_head(hidden, weight, bias)
    check_positive(
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        chunk_bytes=chunk_bytes,
    )
    check_shape(hidden.shape[:-1], "hidden without D", **per_token)
    check_bool(response_mask=per_token.get("response_mask"))
    check_same_device(hidden=hidden, **per_token)
    dtype = matmul_dtype(hidden, weight)
    return Settings(temperature, logit_scale, logit_softcap, chunk_bytes, dtype)
