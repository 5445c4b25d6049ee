"""Masked moments and whitening: launchers, registration, entries."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels._triton import tiling as tiles
from ppo_kernels._triton._compile import CompileSpec
from ppo_kernels._triton.whiten_kernels import moments_kernel, whiten_kernel

NUM_WARPS = 4

MAX_PROGRAMS = 1024
"""One wave: at 56 registers a thread, 9 programs fit on each of the 132 cores of a H200."""

ONE_TILE = 8192
"""Elements up to which one program holds all of x in registers: 32 a thread at 8 warps."""


def _launch_moments(x: Tensor, mask: Tensor, split_mean: bool) -> Tensor:
    tiling = tiles.tiling(x, mask)
    n_programs = max(1, min(tiling.n_tiles, MAX_PROGRAMS))
    partials = x.new_empty((4, n_programs), dtype=torch.float32)
    moments = x.new_empty(4 if split_mean else 3, dtype=torch.float32)
    with tiles.on_device_of(x):
        moments_kernel[(n_programs,)](
            x,
            tiles.as_bytes(mask),
            partials,
            tiles.ticket(x.device),
            moments,
            tiling.n_rows,
            tiling.n_cols,
            tiling.n_tiles,
            *tiling.strides(x),
            *tiling.strides(mask),
            **tiling.shape,
            SLOTS=tiles.SLOTS_PER_WARP * NUM_WARPS,
            SPLIT_MEAN=split_mean,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return moments


def _launch_masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    return _launch_moments(x, mask, split_mean=False)


def _launch_whiten(
    x: Tensor, mask: Tensor, shift_mean: bool, eps: float, moments: Tensor | None
) -> Tensor:
    """One launch with moments given or x in one tile; two otherwise.

    A launch cannot use a sum over all of its programs before every one of them has run, so
    larger x takes a launch for its moments.
    """
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out
    tiling, mode, num_warps = tiles.tiling(x, mask), "given", NUM_WARPS
    if moments is None:
        one_tile = tiles.tiling(x, mask, one_tile=ONE_TILE)
        if one_tile.n_tiles == 1:
            tiling, mode, num_warps = one_tile, "tile", 8
        else:
            moments, mode = _launch_moments(x, mask, split_mean=True), "split"
    with tiles.on_device_of(x):
        whiten_kernel[(tiling.n_tiles,)](
            x,
            tiles.as_bytes(mask),
            moments,
            out,
            tiling.n_rows,
            tiling.n_cols,
            *tiling.strides(x),
            *tiling.strides(mask),
            float(eps),
            MOMENTS=mode,
            SHIFT_MEAN=shift_mean,
            **tiling.shape,
            num_warps=num_warps,
            enable_fp_fusion=True,
        )
    return out


torch.library.custom_op("ppo_kernels::masked_moments", _launch_masked_moments, mutates_args=())
torch.library.custom_op("ppo_kernels::whiten", _launch_whiten, mutates_args=())


@torch.library.register_fake("ppo_kernels::masked_moments")
def _fake_masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(3, dtype=torch.float32)


@torch.library.register_fake("ppo_kernels::whiten")
def _fake_whiten(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    return tiles.run("masked_moments", _launch_masked_moments, x, mask)


def whiten(x: Tensor, mask: Tensor, shift_mean: bool, eps: float, moments: Tensor | None) -> Tensor:
    return tiles.run("whiten", _launch_whiten, x, mask, shift_mean, eps, moments)


def compile_specs() -> list[CompileSpec]:
    """Both kernels at each of their tiles, for lengths that are multiples of 4 and others."""
    mask = {"mask_ptr": "*u8", "ticket_ptr": "*i32"}
    specs = []
    for name, tile in tiles.spec_tiles().items():
        split = {**tile, "SLOTS": tiles.SLOTS_PER_WARP * NUM_WARPS, "SPLIT_MEAN": True}
        wide = name == "flat"
        specs.append(
            tiles.compile_spec(moments_kernel, f"moments {name}", split, mask, streaming_loads=wide)
        )
        for mode in ("given", "split"):
            known = {**tile, "MOMENTS": mode, "SHIFT_MEAN": True}
            label = f"whiten {name}, moments {mode}"
            specs.append(
                tiles.compile_spec(whiten_kernel, label, known, mask, streaming_loads=wide)
            )
        shape = {**tile, "ROWS": 1, "COLS": ONE_TILE} if name.startswith("flat") else tile
        own = {**shape, "MOMENTS": "tile", "SHIFT_MEAN": True}
        pointers = {**mask, "moments_ptr": None}
        label = f"whiten one tile {name}"
        specs.append(tiles.compile_spec(whiten_kernel, label, own, pointers, 8, wide))
    return specs
