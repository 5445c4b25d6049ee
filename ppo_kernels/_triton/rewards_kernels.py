"""Kernels of the KL penalty per token and of token rewards."""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.tile_kernels import (
    load_mask,
    load_rows,
    load_tile,
    offsets,
    tile_index,
)

MAX_K3_EXPONENT = tl.constexpr(88.0)  # exp(88) = 1.7e38: the last whole exponent of float32
MAX_K2_DISTANCE = tl.constexpr(1.8e19)  # its square is about the largest float32


@triton.jit
def exp(x):
    """eˣ for x ≤ 88 to about two roundings: 2ⁿ·e^(x − n·ln 2), where both products are exact.

    tl.exp is 2^(x·log₂ e): rounding that exponent costs |x| roundings of the result.
    """
    x = tl.where(x < -88.0, -88.0, x)  # n = −127 is the exponent of 0
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    remainder = (x - n * 0.693359375) + n * 2.12194440e-4
    return power * tl.exp2(remainder * 1.4426950408889634)


@triton.jit
def expm1_minus(x, exp_x):
    """eˣ − 1 − x, given eˣ: x²/2! + … + x¹¹/11! for |x| < 1, where the difference would cancel."""
    small = tl.abs(x) < 1.0
    z = tl.where(small, x, 0.0)
    s = 1.0 / 362880.0 + z * (1.0 / 3628800.0 + z * (1.0 / 39916800.0))
    s = 1.0 / 720.0 + z * (1.0 / 5040.0 + z * (1.0 / 40320.0 + z * s))
    s = 0.5 + z * (1.0 / 6.0 + z * (1.0 / 24.0 + z * (1.0 / 120.0 + z * s)))
    return tl.where(small, z * z * s, (exp_x - 1.0) - x)


@triton.jit
def kl_estimate(delta, ESTIMATOR: tl.constexpr):
    """KL estimate of one token from Δ = log π − log π_ref. NaN passes through every select."""
    if ESTIMATOR == "k1":
        return delta
    elif ESTIMATOR == "abs":
        return tl.abs(delta)
    elif ESTIMATOR == "k2":
        distance = tl.abs(delta)
        distance = tl.where(distance > MAX_K2_DISTANCE, MAX_K2_DISTANCE, distance)
        return 0.5 * distance * distance
    else:
        tl.static_assert(ESTIMATOR == "k3")
        exponent = tl.where(-delta > MAX_K3_EXPONENT, MAX_K3_EXPONENT, -delta)
        return expm1_minus(-delta, exp(exponent))


@triton.jit
def kl_slope(delta, ESTIMATOR: tl.constexpr):
    """d kl_estimate / dΔ; what the limits of float32 cut off keeps its slope at the limit."""
    sign = tl.where(delta > 0.0, 1.0, tl.where(delta < 0.0, -1.0, delta))
    if ESTIMATOR == "k1":
        return tl.full(delta.shape, 1.0, tl.float32)
    elif ESTIMATOR == "abs":
        return sign
    elif ESTIMATOR == "k2":
        distance = tl.abs(delta)
        return tl.where(distance > MAX_K2_DISTANCE, MAX_K2_DISTANCE, distance) * sign
    else:
        tl.static_assert(ESTIMATOR == "k3")
        x = tl.where(-delta > MAX_K3_EXPONENT, MAX_K3_EXPONENT, -delta)
        exp_x = exp(x)
        return -tl.where(tl.abs(x) < 1.0, x + expm1_minus(x, exp_x), exp_x - 1.0)


@triton.jit
def score_on_last(score, counted, placed, BLOCK: tl.constexpr):
    """Put score [ROWS] on each row's last counted token; blocks must come right to left.

    `placed` [ROWS] says whether a block further right had the row's last token already.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    last = tl.max(tl.where(counted, lane, -1), 1)
    here = (lane == last[:, None]) & (placed == 0)[:, None]
    return tl.where(here, score[:, None], 0.0), placed | (last >= 0).to(tl.int32)


_ROW_STRIDES = ["logprobs_row", "ref_row", "mask_row", "grad_row"]


@triton.jit(do_not_specialize=["n_rows", "n_cols", *_ROW_STRIDES])
def kl_penalty_kernel(
    logprobs_ptr, ref_ptr, mask_ptr, grad_ptr, out_ptr,
    n_rows, n_cols,
    logprobs_row, logprobs_col, ref_row, ref_col,
    mask_row, mask_col, grad_row, grad_col,
    ESTIMATOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Forward when grad_ptr is None, else gradient of logprobs (ref_logprobs' is its negative)."""
    n_cols = n_cols // VEC * VEC
    rows, cols = tile_index(tl.program_id(0), n_cols, ROWS, COLS)
    inside = (rows < n_rows) & (cols < n_cols)
    counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
    logprobs = load_tile(logprobs_ptr, rows, cols, logprobs_row, logprobs_col, counted, inside, VEC)
    ref = load_tile(ref_ptr, rows, cols, ref_row, ref_col, counted, inside, VEC)
    if grad_ptr is None:
        out = kl_estimate(logprobs - ref, ESTIMATOR)
    else:
        grad = load_tile(grad_ptr, rows, cols, grad_row, grad_col, counted, inside, VEC)
        out = grad * kl_slope(logprobs - ref, ESTIMATOR)
    tl.store(out_ptr + offsets(rows, cols, n_cols, 1, VEC), out, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_cols", *_ROW_STRIDES[:3], "score_stride"])
def token_rewards_kernel(
    scores_ptr, logprobs_ptr, ref_ptr, mask_ptr, out_ptr,
    n_rows, n_cols, score_stride,
    logprobs_row, logprobs_col, ref_row, ref_col, mask_row, mask_col,
    kl_coef,
    ESTIMATOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """r = −β·kl, plus the score on the last counted token of the row."""
    n_cols = n_cols // VEC * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = row[:, None]
    score = load_rows(scores_ptr, row, score_stride, n_rows)
    placed = tl.zeros([ROWS], tl.int32)
    n_blocks = tl.cdiv(n_cols, COLS)
    for i in range(n_blocks):
        cols = (n_blocks - 1 - i).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
        logprobs = load_tile(
            logprobs_ptr, rows, cols, logprobs_row, logprobs_col, counted, inside, VEC
        )
        ref = load_tile(ref_ptr, rows, cols, ref_row, ref_col, counted, inside, VEC)
        rewards, placed = score_on_last(score, counted, placed, COLS)
        rewards = tl.where(counted, rewards - kl_coef * kl_estimate(logprobs - ref, ESTIMATOR), 0.0)
        tl.store(out_ptr + offsets(rows, cols, n_cols, 1, VEC), rewards, mask=inside)
