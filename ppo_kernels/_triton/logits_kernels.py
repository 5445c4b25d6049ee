"""Kernels over rows of logits: log-probability, entropy and exact KL, forward and backward.

Arithmetic is in float32 and to base 2. With c = log₂e/τ and the maximum m of the logits z so far,
each lane keeps, over the columns that it sees,

    d = (z − m)·c,   s = Σ 2^d,   u = Σ 2^d·d,   w = Σ 2^d·(d − d_ref)

and ln2 turns results into nats: log π(a) = d_a − log₂s, H = log₂s − u/s, KL = w/s − log₂s +
log₂s_ref. Only distances from m enter the sums: an offset that is common to a row cancels, and a
certain token has exactly log π = 0 and H = 0. When the maximum rises, sums decay by 2^step, with
step = (m_old − m_new)·c, and distances shift by step. A lane has a maximum of its own: nothing
crosses threads before the end of the row, so the loop has no barrier and no shuffle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.logits_rows import (
    body,
    by_lane,
    edge_columns,
    load_logits,
    load_row,
    split_row,
    store_row,
    tile,
    unspecialized,
)

LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the maximum of nothing: −inf − −inf is NaN
VANISHED = tl.constexpr(-200.0)  # 2^−200 is 0 in float32; 0·−200 is 0 where 0·−inf would be NaN


@triton.jit
def _bounded(d):
    return tl.maximum(d, VANISHED, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _weigh(m, z, log2_scale):
    """Return the lanes' new maximum, and z as distances from it, [UNROLL, LANES, VEC]."""
    z = by_lane(z, m.shape[0])
    top = tl.maximum(m, tl.max(tl.max(z, axis=2), axis=0))
    return top, (z - top[None, :, None]) * log2_scale


@triton.jit
def _rebase(step, s, u):
    """Return the decay of a step of the maximum, and s = Σ 2^d and u = Σ 2^d·d after it."""
    step = _bounded(step)
    decay = tl.exp2(step)
    return decay, decay * s, decay * (u + step * s)


@triton.jit
def _rebase_cross(decay, step, step_ref, s, w):
    """Return w after a step of both maxima; an infinite w or step must not meet a decay of 0."""
    return tl.where(decay > 0, decay * (w + (step - step_ref) * s), 0.0)


@triton.jit
def _add(m, s, u, z, log2_scale, WITH_U: tl.constexpr):
    """Add a tile to the lanes' sums."""
    top, d = _weigh(m, z, log2_scale)
    _, s, u = _rebase((m - top) * log2_scale, s, u)
    if WITH_U:
        d = _bounded(d)
    e = tl.exp2(d)
    if WITH_U:
        u += _lane_sum(e * d)
    return top, s + _lane_sum(e), u


@triton.jit
def _add_pair(m, s, u, m_ref, s_ref, w, z, z_ref, log2_scale):
    """Add a tile of both tensors; d_ref enters w unbounded, for log q counts where q is 0."""
    top, d = _weigh(m, z, log2_scale)
    top_ref, d_ref = _weigh(m_ref, z_ref, log2_scale)
    d = _bounded(d)
    e = tl.exp2(d)
    step, step_ref = (m - top) * log2_scale, (m_ref - top_ref) * log2_scale
    decay, new_s, u = _rebase(step, s, u)
    w = _rebase_cross(decay, step, step_ref, s, w)
    w += _lane_sum(tl.where(e > 0, e * (d - d_ref), 0.0))
    _, s_ref, _ = _rebase(step_ref, s_ref, s_ref)
    s_ref += _lane_sum(tl.exp2(d_ref))
    return top, new_s + _lane_sum(e), u + _lane_sum(e * d), top_ref, s_ref, w


@triton.jit
def _store_stats(ptr, row, i, top, log2_total, result, read, WIDTH: tl.constexpr):
    """Store what the backward pass needs; zeros for a row that it will not read either."""
    first = ptr + row.to(tl.int64) * WIDTH + i
    tl.store(first, tl.where(read, top, 0.0))
    tl.store(first + 1, tl.where(read, log2_total, 0.0))
    tl.store(first + 2, tl.where(read, result, 0.0))


@unspecialized
def forward_kernel(
    logits_ptr, tokens_ptr, mask_ptr, logprobs_ptr, entropy_ptr, stats_ptr,
    inner_size, columns, log2_scale,
    logits_outer: tl.int64, logits_inner: tl.int64, logits_column: tl.int64,
    token_outer: tl.int64, token_inner: tl.int64, mask_outer: tl.int64, mask_inner: tl.int64,
    UNIT: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Reduce a row per program. stats [rows, 3] keeps m, log₂s, and H/ln2 if that is wanted."""
    row = tl.program_id(0)
    outer, inner = (row // inner_size).to(tl.int64), (row % inner_size).to(tl.int64)
    token_at = outer * token_outer + inner * token_inner
    mask_at = outer * mask_outer + inner * mask_inner
    token, counted, read = load_row(tokens_ptr, mask_ptr, token_at, mask_at, columns)
    width = tl.where(read, columns, 0)

    row_ptr = logits_ptr + outer * logits_outer + inner * logits_inner
    head, granules = split_row(row_ptr, width, UNIT, VEC)
    edge = edge_columns(head, granules, LANES, VEC)
    z_token = load_logits(row_ptr, token, logits_column, read, UNIT)
    z_edge = load_logits(row_ptr, edge, logits_column, edge < width, UNIT)
    body_ptr = body(row_ptr, head, UNIT)

    WITH_U: tl.constexpr = entropy_ptr is not None
    zero = tl.zeros((LANES,), tl.float32)
    m, s, u = _add(zero + LOWEST, zero, zero, z_edge, log2_scale, WITH_U)
    for start in range(0, granules, UNROLL * LANES):
        granule, column = tile(start, UNROLL * LANES, VEC)
        z = load_logits(body_ptr, column, logits_column, granule < granules, UNIT)
        m, s, u = _add(m, s, u, z, log2_scale, WITH_U)

    top = tl.max(m, axis=0)
    _, s, u = _rebase((m - top) * log2_scale, s, u)
    total = tl.sum(s, axis=0)
    log2_total = tl.log2(total)
    logprob = (z_token - top) * log2_scale - log2_total
    store_row(logprobs_ptr, row, logprob * LN_2, counted, read)
    entropy = log2_total - tl.sum(u, axis=0) / total  # log₂s where there is no u
    _store_stats(stats_ptr, row, 0, top, log2_total, entropy, read, 3)
    if WITH_U:
        store_row(entropy_ptr, row, entropy * LN_2, counted, read)


@unspecialized
def forward_pair_kernel(
    logits_ptr, ref_ptr, tokens_ptr, mask_ptr,
    logprobs_ptr, entropy_ptr, kl_ptr, ref_logprobs_ptr, stats_ptr,
    inner_size, columns, log2_scale,
    logits_outer: tl.int64, logits_inner: tl.int64, logits_column: tl.int64,
    ref_outer: tl.int64, ref_inner: tl.int64, ref_column: tl.int64,
    token_outer: tl.int64, token_inner: tl.int64, mask_outer: tl.int64, mask_inner: tl.int64,
    UNIT: tl.constexpr, REF_ALIGNED: tl.constexpr,
    VEC: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Reduce a row of both; stats [rows, 6] keeps m, log₂s, H/ln2, m_ref, log₂s_ref, KL/ln2."""
    row = tl.program_id(0)
    outer, inner = (row // inner_size).to(tl.int64), (row % inner_size).to(tl.int64)
    token_at = outer * token_outer + inner * token_inner
    mask_at = outer * mask_outer + inner * mask_inner
    token, counted, read = load_row(tokens_ptr, mask_ptr, token_at, mask_at, columns)
    width = tl.where(read, columns, 0)

    row_ptr = logits_ptr + outer * logits_outer + inner * logits_inner
    ref_row_ptr = ref_ptr + outer * ref_outer + inner * ref_inner
    head, granules = split_row(row_ptr, width, UNIT, VEC)
    edge = edge_columns(head, granules, LANES, VEC)
    z_edge = load_logits(row_ptr, edge, logits_column, edge < width, UNIT)
    z_ref_edge = load_logits(ref_row_ptr, edge, ref_column, edge < width, UNIT)
    z_token = load_logits(row_ptr, token, logits_column, read, UNIT)
    z_ref_token = load_logits(ref_row_ptr, token, ref_column, read, UNIT)
    body_ptr, ref_body_ptr = body(row_ptr, head, UNIT), body(ref_row_ptr, head, REF_ALIGNED)

    zero = tl.zeros((LANES,), tl.float32)
    m, s, u, m_ref, s_ref, w = _add_pair(
        zero + LOWEST, zero, zero, zero + LOWEST, zero, zero, z_edge, z_ref_edge, log2_scale
    )
    for start in range(0, granules, UNROLL * LANES):
        granule, column = tile(start, UNROLL * LANES, VEC)
        z = load_logits(body_ptr, column, logits_column, granule < granules, UNIT)
        z_ref = load_logits(ref_body_ptr, column, ref_column, granule < granules, UNIT)
        m, s, u, m_ref, s_ref, w = _add_pair(m, s, u, m_ref, s_ref, w, z, z_ref, log2_scale)

    top, top_ref = tl.max(m, axis=0), tl.max(m_ref, axis=0)
    step, step_ref = (m - top) * log2_scale, (m_ref - top_ref) * log2_scale
    decay, new_s, u = _rebase(step, s, u)
    w = _rebase_cross(decay, step, step_ref, s, w)
    _, s_ref, _ = _rebase(step_ref, s_ref, s_ref)
    total = tl.sum(new_s, axis=0)
    log2_total, log2_ref_total = tl.log2(total), tl.log2(tl.sum(s_ref, axis=0))
    entropy = log2_total - tl.sum(u, axis=0) / total
    kl = tl.sum(w, axis=0) / total - log2_total + log2_ref_total
    store_row(kl_ptr, row, kl * LN_2, counted, read)
    if tokens_ptr is not None:
        logprob = (z_token - top) * log2_scale - log2_total
        ref_logprob = (z_ref_token - top_ref) * log2_scale - log2_ref_total
        store_row(logprobs_ptr, row, logprob * LN_2, counted, read)
        store_row(entropy_ptr, row, entropy * LN_2, counted, read)
        store_row(ref_logprobs_ptr, row, ref_logprob * LN_2, counted, read)
    _store_stats(stats_ptr, row, 0, top, log2_total, entropy, read, 6)
    _store_stats(stats_ptr, row, 3, top_ref, log2_ref_total, kl, read, 6)
