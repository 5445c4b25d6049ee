"""Kernel of the clipped policy and value losses, their gradients and their metrics."""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.rewards_kernels import exp, expm1_minus
from ppo_kernels._triton.tile_kernels import (
    combine_moments,
    is_last_program,
    load_tile,
    merge_moments,
    offsets,
    store_moments,
    sum_slots,
    tile_index,
    tile_moments,
)

MAX_LOG_RATIO = tl.constexpr(40.0)  # exp(40)² = 5.5e34: the ratio's variance still fits in float32


@triton.jit
def policy_tokens(logprobs, old_logprobs, advantages, low, high, dual_clip):
    """Per token: loss, its gradient in logprobs, whether the clip binds, ρ, and k3 of old to new.

    Every comparison is arranged so that NaN reaches the loss.
    """
    log_ratio = logprobs - old_logprobs
    exponent = tl.where(log_ratio > MAX_LOG_RATIO, MAX_LOG_RATIO, log_ratio)
    ratio = exp(exponent)
    clipped_ratio = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    unclipped = -advantages * ratio
    clipped = -advantages * clipped_ratio
    binds = clipped > unclipped
    loss = tl.where(unclipped >= clipped, unclipped, clipped)
    grad = tl.where(binds, 0.0, unclipped)  # d(−Âρ)/d logprob = −Âρ
    cap = -dual_clip * advantages
    capped = (advantages < 0.0) & (loss > cap)
    loss = tl.where(capped, cap, loss)
    grad = tl.where(capped, 0.0, grad)
    return loss, grad, binds, ratio, expm1_minus(log_ratio, ratio)


@triton.jit
def value_tokens(values, old_values, returns, cliprange, CLIP: tl.constexpr):
    """Per token: squared error, half its gradient in values, whether the clip binds."""
    error = values - returns
    loss = error * error
    binds = loss < 0.0
    grad = error
    if CLIP:
        low, high = old_values - cliprange, old_values + cliprange
        clipped_values = tl.where(values >= low, tl.where(values <= high, values, high), low)
        clipped = (clipped_values - returns) * (clipped_values - returns)
        binds = clipped > loss
        grad = tl.where(binds, 0.0, error)
        ordered = tl.where(loss >= clipped, loss, loss + clipped)  # NaN in either gives NaN
        loss = tl.where(binds, clipped, ordered)
    return loss, grad, binds


@triton.jit
def store_statistics(
    partials_ptr,
    loss_ptr,
    stats_ptr,
    n_slots,
    vf_coef,
    MASK_WEIGHTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Merge the programs' sums, in the order of their slots, into the loss and the metrics."""
    count, shift, offset, m2 = merge_moments(partials_ptr, 0, n_slots, SLOTS)
    divisor = tl.maximum(count, 1.0)
    scale = 1.0
    if MASK_WEIGHTS:
        scale = 1.0 / divisor
    policy = sum_slots(partials_ptr, 4, n_slots, SLOTS) * scale
    value = 0.5 * sum_slots(partials_ptr, 7, n_slots, SLOTS) * scale
    tl.store(loss_ptr, policy + vf_coef * value)
    tl.store(stats_ptr, policy)
    tl.store(stats_ptr + 1, sum_slots(partials_ptr, 5, n_slots, SLOTS) / divisor)
    tl.store(stats_ptr + 2, sum_slots(partials_ptr, 6, n_slots, SLOTS) / divisor)
    tl.store(stats_ptr + 3, shift + offset)
    tl.store(stats_ptr + 4, m2 / divisor)
    tl.store(stats_ptr + 5, count)
    tl.store(stats_ptr + 6, value)
    tl.store(stats_ptr + 7, sum_slots(partials_ptr, 8, n_slots, SLOTS) / divisor)
    tl.store(stats_ptr + 8, scale)


_ROW_STRIDES = ["new_row", "old_row", "adv_row", "values_row", "oldv_row", "returns_row"]


@triton.jit(do_not_specialize=["n_rows", "n_cols", "weights_row", *_ROW_STRIDES])
def clipped_losses_kernel(
    logprobs_ptr, old_ptr, adv_ptr,
    values_ptr, oldv_ptr, returns_ptr,
    weights_ptr, logprobs_grad_ptr, values_grad_ptr,
    partials_ptr, ticket_ptr, loss_ptr, stats_ptr,
    n_rows, n_cols,
    new_row, new_col, old_row, old_col, adv_row, adv_col,
    values_row, values_col, oldv_row, oldv_col, returns_row, returns_col,
    weights_row, weights_col,
    low, high, dual_clip, cliprange_value, vf_coef,
    MASK_WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Either half is left out when its pointers are None, a gradient when its pointer is."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    n_cols = n_cols // VEC * VEC
    count, shift, offset, m2 = 0.0, 0.0, 0.0, 0.0
    policy_sum, policy_binds, kl_sum, value_sum, value_binds = 0.0, 0.0, 0.0, 0.0, 0.0
    n_tiles = tl.cdiv(n_rows, ROWS) * tl.cdiv(n_cols, COLS)
    for tile in range(program, n_tiles, n_programs):
        rows, cols = tile_index(tile, n_cols, ROWS, COLS)
        inside = (rows < n_rows) & (cols < n_cols)
        at = offsets(rows, cols, weights_row, weights_col, VEC)
        w = tl.load(weights_ptr + at, mask=inside, other=0).to(tl.float32)
        counted = w != 0.0
        at = offsets(rows, cols, n_cols, 1, VEC)
        # All loads come first: none may pass a store or a barrier below.
        if logprobs_ptr is not None:
            x = load_tile(logprobs_ptr, rows, cols, new_row, new_col, counted, inside, VEC)
            old = load_tile(old_ptr, rows, cols, old_row, old_col, counted, inside, VEC)
            adv = load_tile(adv_ptr, rows, cols, adv_row, adv_col, counted, inside, VEC)
        if values_ptr is not None:
            v = load_tile(values_ptr, rows, cols, values_row, values_col, counted, inside, VEC)
            ret = load_tile(returns_ptr, rows, cols, returns_row, returns_col, counted, inside, VEC)
            oldv = v
            if oldv_ptr is not None:
                oldv = load_tile(oldv_ptr, rows, cols, oldv_row, oldv_col, counted, inside, VEC)
        if logprobs_ptr is not None:
            loss, grad, binds, ratio, kl = policy_tokens(x, old, adv, low, high, dual_clip)
            if logprobs_grad_ptr is not None:
                tl.store(logprobs_grad_ptr + at, w * grad, mask=inside)
            policy_sum += tl.sum(w * loss)
            policy_binds += tl.sum(binds.to(tl.float32))
            kl_sum += tl.sum(kl)
            c, s, o, m = tile_moments(tl.where(counted, ratio, 0.0), counted)
            count, shift, offset, m2 = combine_moments(count, shift, offset, m2, c, s, o, m)
        else:
            count += tl.sum(counted.to(tl.int32)).to(tl.float32)
        if values_ptr is not None:
            loss, grad, binds = value_tokens(v, oldv, ret, cliprange_value, oldv_ptr is not None)
            if values_grad_ptr is not None:
                tl.store(values_grad_ptr + at, vf_coef * w * grad, mask=inside)
            value_sum += tl.sum(w * loss)
            value_binds += tl.sum(binds.to(tl.float32))
    store_moments(partials_ptr, 0, program, n_programs, count, shift, offset, m2)
    tl.store(partials_ptr + 4 * n_programs + program, policy_sum)
    tl.store(partials_ptr + 5 * n_programs + program, policy_binds)
    tl.store(partials_ptr + 6 * n_programs + program, kl_sum)
    tl.store(partials_ptr + 7 * n_programs + program, value_sum)
    tl.store(partials_ptr + 8 * n_programs + program, value_binds)
    if is_last_program(ticket_ptr):
        store_statistics(
            partials_ptr, loss_ptr, stats_ptr, n_programs, vf_coef, MASK_WEIGHTS, SLOTS
        )
