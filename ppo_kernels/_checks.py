"""Checks of arguments; every message names the argument, what it must be, and what it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_kernels.reference import IGNORE_INDEX

_MEANING = {
    "response_mask": " (True = the token counts)",
    "mask": " (True = the token counts)",
}


def check_floating(**tensors: Tensor | None) -> None:
    """Refuse integer, bool and complex tensors; None passes."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise TypeError(f"{name} must be a floating-point tensor, got {tensor.dtype}")


def check_bool(**tensors: Tensor | None) -> None:
    """Refuse masks that are not bool: 0/1 floats and inverse masks look alike."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bool:
            raise TypeError(f"{name} must be bool{_MEANING.get(name, '')}, got {tensor.dtype}")


def check_shape(shape: torch.Size, like: str, **tensors: Tensor | None) -> None:
    """Refuse tensors whose shape is not `shape`, which is that of the argument named `like`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} ({like}), got {list(tensor.shape)}"
            )


def check_2d(**tensors: Tensor) -> None:
    """Refuse tensors that are not [B, T]."""
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have shape [B, T], got {list(tensor.shape)}")


def check_same_device(**tensors: Tensor | None) -> None:
    """Refuse tensors that are not on the device of the first."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *others = given
    for name in others:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{name} must be on {given[first].device} (the device of {first}), "
                f"got {given[name].device}"
            )


def check_positive(**numbers: float | None) -> None:
    """Refuse numbers that are not positive and finite; None passes."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {number}")


def check_finite(**numbers: float) -> None:
    """Refuse NaN and infinities."""
    for name, number in numbers.items():
        if not -math.inf < number < math.inf:
            raise ValueError(f"{name} must be finite, got {number}")


def check_unit_interval(**numbers: float) -> None:
    """Refuse numbers outside [0, 1]."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number}")


def check_one_of(choices: tuple[str, ...], **names: str) -> None:
    """Refuse names that are not among the choices."""
    for argument, name in names.items():
        if name not in choices:
            *most, last = map(repr, choices)
            raise ValueError(f"{argument} must be {', '.join(most)} or {last}, got {name!r}")


def check_clip(cliprange: float, cliprange_high: float | None, dual_clip: float | None) -> None:
    """Refuse clip widths that make no sense."""
    if not 0 < cliprange < 1:
        raise ValueError(f"cliprange must be in (0, 1), got {cliprange}")
    check_positive(cliprange_high=cliprange_high)
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip must be greater than 1 and finite, got {dual_clip}")


def check_weights(weights: Tensor) -> None:
    """Refuse weights that are neither a bool mask nor floats."""
    if weights.dtype != torch.bool and not weights.dtype.is_floating_point:
        raise TypeError(
            "weights must be bool (True = the token counts) or floating-point "
            f"(as token_weights returns), got {weights.dtype}"
        )


def check_vocab_size(logits: Tensor, vocab_size: int | None, name: str = "logits") -> int:
    """Return how many columns of the logits are read; refuse more than there are, or none."""
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name} must have shape [..., V] with V > 0, got {list(logits.shape)}")
    if vocab_size is None:
        return logits.shape[-1]
    if not 0 < vocab_size <= logits.shape[-1]:
        raise ValueError(
            f"vocab_size must be in [1, {logits.shape[-1]}] (the last dimension of {name}), "
            f"got {vocab_size}"
        )
    return vocab_size


def check_tokens(tokens: Tensor, vocab_size: int, response_mask: Tensor | None) -> None:
    """Refuse tokens that are not int64 and, where looking costs nothing, ids out of range."""
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens must be torch.int64, got {tokens.dtype}")
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading a value would stop the device, or break the graph
    outside = ((tokens < 0) | (tokens >= vocab_size)) & (tokens != IGNORE_INDEX)
    if response_mask is not None:
        outside = outside & response_mask
    if outside.any():
        first = tokens[outside][0].item()
        raise ValueError(
            f"tokens must be in [0, {vocab_size}) or {IGNORE_INDEX} where they count, got {first}"
        )


def check_inplace_backward(logits: Tensor) -> None:
    """Refuse logits whose memory the backward pass must not overwrite."""
    if torch.compiler.is_compiling():
        raise ValueError("inplace_backward must be False under torch.compile")
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return
    owner = logits if logits._base is None else logits._base  # whose memory it is
    if owner.is_leaf:
        raise ValueError(
            "inplace_backward would overwrite logits that are, or view, a leaf of the graph (a "
            "parameter, or a tensor with requires_grad=True); pass a model's output, or a clone"
        )
    if any(s == 0 and n > 1 for s, n in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "inplace_backward needs logits with memory of their own for every element, got an "
            f"expanded tensor with strides {list(logits.stride())}; pass logits.contiguous()"
        )


def check_logits(
    logits: Tensor,
    temperature: float,
    vocab_size: int | None,
    response_mask: Tensor | None,
    *,
    tokens: Tensor | None = None,
    ref_logits: Tensor | None = None,
) -> int:
    """Check the arguments that the operators over logits share; return the columns to read."""
    check_floating(logits=logits, ref_logits=ref_logits)
    columns = check_vocab_size(logits, vocab_size)
    check_positive(temperature=temperature)
    leading = logits.shape[:-1]
    check_shape(leading, "logits without V", tokens=tokens, response_mask=response_mask)
    check_bool(response_mask=response_mask)
    check_same_device(
        logits=logits, ref_logits=ref_logits, tokens=tokens, response_mask=response_mask
    )
    if ref_logits is not None:
        check_vocab_size(ref_logits, vocab_size, "ref_logits")
        width = logits.shape[-1] if vocab_size is None else ref_logits.shape[-1]
        check_shape(torch.Size([*leading, width]), "logits", ref_logits=ref_logits)
    if tokens is not None:
        check_tokens(tokens, columns, response_mask)
    return columns
