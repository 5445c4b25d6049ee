"""Which implementation of an operator runs: `resolve_impl` decides, and never falls back."""

from __future__ import annotations

import os
import warnings
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


class Impl(str, Enum):
    """An implementation of an operator; `AUTO` stands for the best one for the tensors' device."""

    AUTO = "auto"
    TRITON = "triton"
    TORCH = "torch"
    REFERENCE = "reference"


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # sys.modules holds None for it: somebody has blocked the import
        return False


_HAS_TRITON = _is_importable("triton")  # find_spec looks, and does not import
_GPU_TYPES = ("cuda", "xpu")  # ROCm calls its devices cuda as well
_NAMES = tuple(impl.value for impl in Impl)


def resolve_impl(impl: str, *tensors: Tensor | None) -> Impl:
    """Return the implementation that `impl` means for these tensors; the first gives the device.

    `auto` is triton for tensors on a GPU, and torch elsewhere and for float64. On a GPU without
    the triton package it is torch as well, with a warning. Every other name is taken literally.

    Raises:
        ValueError: `impl` is unknown, or is "triton" for tensors that Triton cannot reach.
        TypeError: `impl` is "triton" and a tensor is float64.
        ModuleNotFoundError: `impl` is "triton" and the package is not installed.
    """
    if impl not in _NAMES:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _NAMES))}, got {impl!r}")
    chosen = Impl(impl)
    device = next(t.device for t in tensors if t is not None)
    is_float64 = any(t is not None and t.dtype == torch.float64 for t in tensors)
    if chosen is Impl.AUTO:
        if device.type not in _GPU_TYPES or is_float64:
            return Impl.TORCH
        if not _HAS_TRITON:
            warnings.warn(
                "ppo_kernels runs its slower PyTorch operators on this GPU because triton is not "
                "installed; install triton, or pass impl='torch' to silence this",
                RuntimeWarning,
                stacklevel=3,
            )
            return Impl.TORCH
        return Impl.TRITON
    if chosen is Impl.TRITON:
        _require_triton(device, is_float64)
    return chosen


def _require_triton(device: torch.device, is_float64: bool) -> None:
    if not _HAS_TRITON:
        raise ModuleNotFoundError(
            "impl='triton' needs the triton package; install it or use impl='torch'", name="triton"
        )
    if is_float64:
        raise TypeError(
            "impl='triton' computes in float32 and takes no torch.float64 tensors; "
            "use impl='torch' or impl='reference'"
        )
    if device.type not in _GPU_TYPES and not _interpreter_is_on():
        raise ValueError(
            f"impl='triton' cannot run on {device.type} tensors: move them to a GPU, set "
            "TRITON_INTERPRET=1 before ppo_kernels runs its first kernel (for tests, slow), "
            "or use impl='torch'"
        )


def _interpreter_is_on() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def as_2d(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return tensors of any shape as matrices, which is what the kernels over tokens take."""
    return tuple(t if t is None or t.dim() == 2 else _as_2d(t) for t in tensors)


def _as_2d(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(0, -2)
