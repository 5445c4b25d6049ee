"""Kernels of GAE and of token rewards + GAE + moments: a reverse scan of affine maps.

Â_t = δ_t + γλ·Â_{t+1} is the map x → γλ·x + δ_t applied to Â_{t+1}. Maps compose associatively,
so a block of tokens is one associative scan, and blocks follow each other right to left with
(Â, V) of the next counted token as carry. A token that does not count is the identity map.

δ_t = r_t + (γV_{t+1} − V_t), with the difference of the values first, keeps the error at that of
the sequential loop or below, also for values far from 0. The shorter one-scan form
(Â = S − V/λ, S a scan over r + V(1−λ)/λ) was dropped: for V around 1000 and λ = 0.1 its error is
more than five times the loop's, and it has no λ = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.rewards_kernels import kl_estimate, score_on_last
from ppo_kernels._triton.tile_kernels import (
    combine_moments,
    is_last_program,
    load_mask,
    load_rows,
    load_tile,
    merge_moments,
    offsets,
    store_moments,
    tile_moments,
)


@triton.jit
def compose(right_scale, right_shift, left_scale, left_shift):
    """left ∘ right for x → scale·x + shift; the scan runs from the right."""
    return right_scale * left_scale, left_shift + left_scale * right_shift


@triton.jit
def nearest(right_seen, right_here, right_after, left_seen, left_here, left_after):
    """What two neighbouring spans know, as seen from the left end of the left one.

    `here` is V of the first token that counts, `after` the same without the lane at the left end;
    bits 0 and 1 of `seen` tell whether there are such tokens. Scanning `after` along is how a
    block moves by one lane: `tl.gather` does it with 216 registers at 1024 lanes, and reading V
    again one column further gives 5 unaligned bytes per token to the caches.
    """
    here = tl.where((left_seen & 1) != 0, left_here, right_here)
    after = tl.where((left_seen & 2) != 0, left_after, right_here)
    seen = (left_seen | right_seen) & 1 | (left_seen | (right_seen << 1)) & 2
    return seen, here, after


@triton.jit
def advantage_block(
    rewards, values, counted, next_advantage, next_value, gamma, decay, BLOCK: tl.constexpr
):
    """Advantages of a block, and (Â, V) of its first counted token as carry for the next block.

    Lanes that do not count hold the advantage of the next token that does.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    seen, here, after = tl.associative_scan(
        (counted.to(tl.int32), values, tl.zeros_like(values)), 1, nearest, reverse=True
    )
    here = tl.where((seen & 1) != 0, here, next_value[:, None])
    after = tl.where((seen & 2) != 0, after, next_value[:, None])
    delta = tl.where(counted, rewards + (gamma * after - values), 0.0)
    scale = tl.where(counted, decay, 1.0)
    scale, shift = tl.associative_scan((scale, delta), 1, compose, reverse=True)
    advantages = shift + scale * next_advantage[:, None]
    next_advantage = tl.sum(tl.where(lane == 0, advantages, 0.0), 1)
    return advantages, next_advantage, tl.sum(tl.where(lane == 0, here, 0.0), 1)


_SIZES = ["n_rows", "n_cols", "bootstrap_stride", "values_row", "mask_row"]


@triton.jit(do_not_specialize=[*_SIZES, "rewards_row"])
def gae_kernel(
    rewards_ptr, values_ptr, mask_ptr, bootstrap_ptr,
    advantages_ptr, returns_ptr,
    n_rows, n_cols,
    bootstrap_stride,
    rewards_row, rewards_col, values_row, values_col, mask_row, mask_col,
    gamma, gae_lambda,
    ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    n_cols = n_cols // VEC * VEC
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = row[:, None]
    advantage = tl.zeros([ROWS], tl.float32)
    value = load_rows(bootstrap_ptr, row, bootstrap_stride, n_rows)
    n_blocks = tl.cdiv(n_cols, COLS)
    for i in range(n_blocks):
        cols = (n_blocks - 1 - i).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
        r = load_tile(rewards_ptr, rows, cols, rewards_row, rewards_col, counted, inside, VEC)
        v = load_tile(values_ptr, rows, cols, values_row, values_col, counted, inside, VEC)
        advantages, advantage, value = advantage_block(
            r, v, counted, advantage, value, gamma, gamma * gae_lambda, COLS
        )
        at = offsets(rows, cols, n_cols, 1, VEC)
        tl.store(advantages_ptr + at, tl.where(counted, advantages, 0.0), mask=inside)
        tl.store(returns_ptr + at, tl.where(counted, advantages + v, 0.0), mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "score_stride", "logprobs_row", "ref_row"])
def ppo_advantages_kernel(
    scores_ptr, logprobs_ptr, ref_ptr, values_ptr, mask_ptr, bootstrap_ptr,
    advantages_ptr, returns_ptr,
    partials_ptr, ticket_ptr, moments_ptr,
    n_rows, n_cols,
    score_stride, bootstrap_stride,
    logprobs_row, logprobs_col, ref_row, ref_col,
    values_row, values_col, mask_row, mask_col,
    kl_coef, gamma, gae_lambda,
    ESTIMATOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    VEC: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Token rewards, which never reach memory, GAE, returns, and the advantages' moments."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    n_cols = n_cols // VEC * VEC
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = row[:, None]
    score = load_rows(scores_ptr, row, score_stride, n_rows)
    advantage = tl.zeros([ROWS], tl.float32)
    value = load_rows(bootstrap_ptr, row, bootstrap_stride, n_rows)
    placed = tl.zeros([ROWS], tl.int32)
    count, mean, offset, m2 = 0.0, 0.0, 0.0, 0.0
    n_blocks = tl.cdiv(n_cols, COLS)
    for i in range(n_blocks):
        cols = (n_blocks - 1 - i).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
        inside = (rows < n_rows) & (cols < n_cols)
        counted = load_mask(mask_ptr, rows, cols, mask_row, mask_col, inside, VEC)
        logprobs = load_tile(
            logprobs_ptr, rows, cols, logprobs_row, logprobs_col, counted, inside, VEC
        )
        ref = load_tile(ref_ptr, rows, cols, ref_row, ref_col, counted, inside, VEC)
        v = load_tile(values_ptr, rows, cols, values_row, values_col, counted, inside, VEC)
        rewards, placed = score_on_last(score, counted, placed, COLS)
        rewards -= kl_coef * kl_estimate(logprobs - ref, ESTIMATOR)
        advantages, advantage, value = advantage_block(
            rewards, v, counted, advantage, value, gamma, gamma * gae_lambda, COLS
        )
        advantages = tl.where(counted, advantages, 0.0)
        at = offsets(rows, cols, n_cols, 1, VEC)
        tl.store(advantages_ptr + at, advantages, mask=inside)
        tl.store(returns_ptr + at, advantages + v, mask=inside)
        c, s, o, m = tile_moments(advantages, counted)
        count, mean, offset, m2 = combine_moments(count, mean, offset, m2, c, s, o, m)
    store_moments(partials_ptr, 0, program, n_programs, count, mean, offset, m2)
    if is_last_program(ticket_ptr):
        count, mean, offset, m2 = merge_moments(partials_ptr, 0, n_programs, SLOTS)
        tl.store(moments_ptr, count)
        tl.store(moments_ptr + 1, mean + offset)
        tl.store(moments_ptr + 2, m2)
