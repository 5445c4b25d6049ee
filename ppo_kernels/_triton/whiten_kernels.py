"""Kernels of masked moments and whitening."""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.tile_kernels import (
    combine_moments,
    is_last_program,
    load_mask,
    load_tile,
    merge_moments,
    offsets,
    store_moments,
    tile_index,
    tile_moments,
)

_SIZES = ["n_rows", "n_cols", "n_tiles", "x_row", "mask_row"]


@triton.jit(do_not_specialize=_SIZES)
def moments_kernel(
    x_ptr, mask_ptr, partials_ptr, ticket_ptr, moments_ptr,
    n_rows, n_cols, n_tiles,
    x_row, x_col, mask_row, mask_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
    SLOTS: tl.constexpr, SPLIT_MEAN: tl.constexpr,
):  # fmt: skip
    """(count, mean, m2) of x over the mask, or (count, shift, offset, m2) with SPLIT_MEAN."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    n_cols = n_cols // VEC * VEC
    count, shift, offset, m2 = 0.0, 0.0, 0.0, 0.0
    for tile in range(program, n_tiles, n_programs):
        rows, cols = tile_index(tile, n_cols, ROWS, COLS)
        inside = (rows < n_rows) & (cols < n_cols)
        counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
        x = load_tile(x_ptr, rows, cols, x_row, x_col, counted, inside, VEC)
        c, s, o, m = tile_moments(x, counted)
        count, shift, offset, m2 = combine_moments(count, shift, offset, m2, c, s, o, m)
    store_moments(partials_ptr, 0, program, n_programs, count, shift, offset, m2)
    if is_last_program(ticket_ptr):
        count, shift, offset, m2 = merge_moments(partials_ptr, 0, n_programs, SLOTS)
        tl.store(moments_ptr, count)
        if SPLIT_MEAN:
            tl.store(moments_ptr + 1, shift)
            tl.store(moments_ptr + 2, offset)
            tl.store(moments_ptr + 3, m2)
        else:
            tl.store(moments_ptr + 1, shift + offset)
            tl.store(moments_ptr + 2, m2)


@triton.jit(do_not_specialize=[*_SIZES[:2], *_SIZES[3:]])
def whiten_kernel(
    x_ptr, mask_ptr, moments_ptr, out_ptr,
    n_rows, n_cols,
    x_row, x_col, mask_row, mask_col,
    eps,
    MOMENTS: tl.constexpr, SHIFT_MEAN: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """y = (x − mean)·rsqrt(var + eps). MOMENTS: "tile" (x fits in one), "split" or "given"."""
    n_cols = n_cols // VEC * VEC
    rows, cols = tile_index(tl.program_id(0), n_cols, ROWS, COLS)
    inside = (rows < n_rows) & (cols < n_cols)
    counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
    x = load_tile(x_ptr, rows, cols, x_row, x_col, counted, inside, VEC)
    if MOMENTS == "tile":
        count, shift, offset, m2 = tile_moments(x, counted)
    elif MOMENTS == "split":
        count, shift = tl.load(moments_ptr), tl.load(moments_ptr + 1)
        offset, m2 = tl.load(moments_ptr + 2), tl.load(moments_ptr + 3)
    else:
        count = tl.load(moments_ptr).to(tl.float32)
        shift = tl.load(moments_ptr + 1).to(tl.float32)
        offset, m2 = 0.0, tl.load(moments_ptr + 2).to(tl.float32)
    variance = m2 / tl.maximum(count - 1.0, 1.0)
    y = ((x - shift) - offset) * tl.rsqrt(variance + eps)
    if not SHIFT_MEAN:
        y += shift + offset
    out = tl.where(counted, y, 0.0)
    tl.store(out_ptr + offsets(rows, cols, n_cols, 1, VEC), out, mask=inside)
