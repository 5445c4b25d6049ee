"""Launchers of the kernels over logits: strides, alignment, and how much a program reads at once.

    row            lanes   loads of 16 bytes in flight per lane
    <= 8 KiB       64      forward 4; two tensors 2 each; backward 2
    longer         256     the same

A lane is a thread. 64 bytes in flight (32 of each input in the backward pass, which needs fewer
registers) at up to 64 registers per lane, hence 1024 lanes per core, are 64 KB per core; to cover
about 1 µs of memory latency at 4.8 TB/s an H200 needs 36 KB on each of its 132 cores. 8 warps are
enough to keep a core half busy with one row and few enough that four rows share it and cover each
other's start and end. Short rows would leave most of 256 lanes idle.

There is no split over V in the forward pass. One row of 128256 bfloat16 is 16 tiles, 15 µs for one
program; with 264 rows the GPU's bandwidth is used up. A split would save at most those 15 µs below
264 rows, would cost a second launch (about 5 µs and 20 µs of Python), and would make the last bit
of a row's result depend on how many rows come with it: the ratio of the first PPO step would no
longer be exactly 1. So the table depends on the row alone. The backward pass reduces nothing, and
splits every row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ppo_kernels._triton._compile import CompileSpec
from ppo_kernels._triton.logits_backward import backward_kernel
from ppo_kernels._triton.logits_kernels import forward_kernel, forward_pair_kernel
from ppo_kernels._triton.tiling import as_bytes, on_device_of

WARP_SIZE = 64 if torch.version.hip else 32
SHORT_ROW_BYTES = 8192
SHORT_LANES, LANES = 64, 256
FORWARD_UNROLL, PAIR_UNROLL, BACKWARD_UNROLL = 4, 2, 2
BACKWARD_TILES = 8
LOG2_E = math.log2(math.e)


class Grads(NamedTuple):
    """Gradients of a row's results, each [...] float32, None where nobody asks for it."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    kl: Tensor | None = None


def rows_of(logits: Tensor) -> Tensor:
    """View [..., V] as [outer, inner, V]; copies where more than two leading dimensions remain."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits[(None,) * (3 - logits.dim())]


def _strides(x: Tensor | None) -> tuple[int, int]:
    """Strides of a value per row, [...], viewed as [outer, inner]."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _per_row(x: Tensor | None) -> Tensor | None:
    if x is None or x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x[(None,) * (2 - x.dim())]


def same_phase(a: Tensor, b: Tensor) -> bool:
    """Whether every row of both starts at the same place within 16 bytes."""
    if a.dtype != b.dtype or (a.data_ptr() - b.data_ptr()) % 16:
        return False
    leading = zip(a.shape[:2], a.stride(), b.stride(), strict=False)
    return all(n == 1 or (s - t) * a.itemsize % 16 == 0 for n, s, t in leading)


def _unit(*tensors: Tensor) -> bool:
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)


def _shape_of_program(columns: int, itemsize: int, unroll: int, unit: bool) -> dict[str, int]:
    """Columns that lie apart take an address and a load each: unrolled, they would spill."""
    lanes = SHORT_LANES if columns * itemsize <= SHORT_ROW_BYTES else LANES
    return {"VEC": 16 // itemsize, "LANES": lanes, "UNROLL": unroll if unit else 1}


def _options(lanes: int) -> dict[str, Any]:
    return {"num_warps": lanes // WARP_SIZE, "num_stages": 1, "enable_fp_fusion": True}


def forward(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return logprobs, entropy (None if not asked for) and the sums that `backward` needs."""
    logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(logprobs) if with_entropy else None
    stats = logprobs.new_empty(tokens.numel(), 3)
    if tokens.numel() == 0:
        return logprobs, entropy, stats
    z, a, mask = rows_of(logits), _per_row(tokens), as_bytes(_per_row(response_mask))
    unit = _unit(z)
    shape = _shape_of_program(columns, z.itemsize, FORWARD_UNROLL, unit)
    with on_device_of(logits):
        forward_kernel[(tokens.numel(),)](
            z, a, mask, logprobs, entropy, stats,
            z.shape[1], columns, LOG2_E / temperature,
            *z.stride(), *_strides(a), *_strides(mask),
            UNIT=unit, **shape, **_options(shape["LANES"]),
        )  # fmt: skip
    return logprobs, entropy, stats


def forward_pair(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor]:
    """Return logprobs, entropy, kl, ref_logprobs and sums; without tokens, kl and sums only."""
    kl = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    logprobs, entropy, ref_logprobs = (
        (None, None, None) if tokens is None else (torch.empty_like(kl) for _ in range(3))
    )
    stats = kl.new_empty(kl.numel(), 6)
    if kl.numel() == 0:
        return logprobs, entropy, kl, ref_logprobs, stats
    z, r, a = rows_of(logits), rows_of(ref_logits), _per_row(tokens)
    mask, unit = as_bytes(_per_row(response_mask)), _unit(z, r)
    shape = _shape_of_program(columns, z.itemsize, PAIR_UNROLL, unit)
    with on_device_of(logits):
        forward_pair_kernel[(kl.numel(),)](
            z, r, a, mask, logprobs, entropy, kl, ref_logprobs, stats,
            z.shape[1], columns, LOG2_E / temperature,
            *z.stride(), *r.stride(), *_strides(a), *_strides(mask),
            UNIT=unit, REF_ALIGNED=unit and same_phase(z, r), **shape,
            **_options(shape["LANES"]),
        )  # fmt: skip
    return logprobs, entropy, kl, ref_logprobs, stats


def empty_grad(logits: Tensor) -> Tensor:
    """Allocate the gradient with the strides of the logits, so that rows start alike in both.

    With V odd that is what keeps the stores 128 bits wide. Logits that are a small part of their
    storage, or have overlapping or adjacent columns elsewhere, get a contiguous gradient.
    """
    size, stride = logits.shape, logits.stride()
    nested = all(stride[i] >= size[i + 1] * stride[i + 1] for i in range(logits.dim() - 1))
    if nested and stride[-1] == 1 and 4 * size[0] * stride[0] <= 5 * logits.numel():
        return torch.empty_strided(size, stride, dtype=logits.dtype, device=logits.device)
    return torch.empty(size, dtype=logits.dtype, device=logits.device)


def backward(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
    stats: Tensor,
    grads: Grads,
    grad_logits: Tensor,
) -> None:
    """Fill `grad_logits`, which may be `logits` itself."""
    if logits.numel() == 0:
        return
    z, out, a = rows_of(logits), rows_of(grad_logits), _per_row(tokens)
    with_kl = grads.kl is not None and ref_logits is not None
    r = rows_of(ref_logits) if with_kl else None
    mask, g = as_bytes(_per_row(response_mask)), Grads(*map(_per_row, grads))
    unit = _unit(z, out) and (r is None or _unit(r))
    shape = _shape_of_program(columns, z.itemsize, BACKWARD_UNROLL, unit)
    granules = BACKWARD_TILES * BACKWARD_UNROLL * shape["LANES"]
    chunks = max(1, triton.cdiv(columns // shape["VEC"], granules))
    with on_device_of(logits):
        backward_kernel[(z.shape[0] * z.shape[1] * chunks,)](
            z, r, a, mask, stats, *g, out,
            z.shape[1], columns, z.shape[2], chunks, LOG2_E / temperature, 1 / temperature,
            *z.stride(), *((0, 0, 0) if r is None else r.stride()), *_strides(a), *_strides(mask),
            *_strides(g.logprobs), *_strides(g.entropy), *_strides(g.kl), *out.stride(),
            stats.shape[1],
            UNIT=unit, REF_ALIGNED=unit and r is not None and same_phase(z, r),
            GRAD_ALIGNED=unit and same_phase(z, out), TILES=BACKWARD_TILES, **shape,
            **_options(shape["LANES"]),
        )  # fmt: skip


def _spec(kernel: Any, label: str, dtype: str, lanes: int, **constexprs: Any) -> CompileSpec:
    unroll = {forward_kernel: FORWARD_UNROLL, forward_pair_kernel: PAIR_UNROLL}
    known = {"UNIT": True, "REF_ALIGNED": True, "GRAD_ALIGNED": True, "LANES": lanes}
    known |= {"VEC": 4 if dtype == "fp32" else 8, "UNROLL": unroll.get(kernel, BACKWARD_UNROLL)}
    known |= {"TILES": BACKWARD_TILES, **constexprs}
    typed = {"logits_ptr": dtype, "ref_ptr": dtype, "grad_ptr": dtype}
    typed |= {"tokens_ptr": "i64", "mask_ptr": "u8"}
    fixed = {name: known[name] for name in kernel.arg_names if name in known}
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            signature[name] = "*" + typed.get(name, "fp32")
        elif name.endswith(("_outer", "_inner", "_column")):
            signature[name] = "i64"
        else:
            signature[name] = "fp32" if name in ("log2_scale", "inv_temperature") else "i32"
    return CompileSpec(
        kernel,
        {name: kind for name, kind in signature.items() if name not in fixed},
        fixed,
        num_warps=lanes // 32,
        label=f"{label} {dtype} lanes={lanes}",
        streaming_loads=fixed["UNIT"],
        hip_num_warps=lanes // 64,
    )


def compile_specs() -> list[CompileSpec]:
    """Every kernel at every dtype and row length, with a mask, and each way to lose alignment."""
    no_tokens = dict.fromkeys(("tokens_ptr", "logprobs_ptr", "entropy_ptr", "ref_logprobs_ptr"))
    no_ref = {"ref_ptr": None, "g_kl_ptr": None, "REF_ALIGNED": False}
    only_kl = dict.fromkeys(("tokens_ptr", "g_logprob_ptr", "g_entropy_ptr"))
    kinds: list[tuple[Any, str, dict[str, Any]]] = [
        (forward_kernel, "logprobs", {"entropy_ptr": None}),
        (forward_kernel, "logprobs, entropy", {}),
        (forward_pair_kernel, "kl", no_tokens),
        (forward_pair_kernel, "statistics", {}),
        (backward_kernel, "d logprobs", {**no_ref, "g_entropy_ptr": None}),
        (backward_kernel, "d logprobs, entropy", no_ref),
        (backward_kernel, "d kl", only_kl),
        (backward_kernel, "d statistics", {}),
    ]
    specs = [
        _spec(kernel, label, dtype, lanes, **constexprs)
        for dtype in ("bf16", "fp16", "fp32")
        for lanes in (SHORT_LANES, LANES)
        for kernel, label, constexprs in kinds
    ]
    lost = {"REF_ALIGNED": False, "GRAD_ALIGNED": False}
    for kernel in (forward_kernel, forward_pair_kernel, backward_kernel):
        specs.append(_spec(kernel, "columns apart", "bf16", LANES, UNIT=False, UNROLL=1, **lost))
        if kernel is not forward_pair_kernel:
            specs.append(_spec(kernel, "rows out of phase", "bf16", LANES, **lost))
    specs += [
        _spec(forward_pair_kernel, "rows out of phase", dtype, lanes, REF_ALIGNED=False)
        for dtype in ("bf16", "fp16", "fp32")
        for lanes in (SHORT_LANES, LANES)
    ]
    return specs
