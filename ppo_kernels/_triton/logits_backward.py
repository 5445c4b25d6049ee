"""The backward kernel of logits: the softmax is rebuilt from the sums that the forward pass kept.

With p = softmax(z/τ), q = softmax(z_ref/τ), and g the gradients of the three results,

    dz = [g_lp·(1{a} − p) − g_H·p·(log p + H) + g_KL·p·(log p − log q − KL)] / τ

formed in float32 and rounded once: at the token's own column 1 − p would lose all its digits if p
were rounded to bfloat16 first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppo_kernels._triton.logits_kernels import LN_2
from ppo_kernels._triton.logits_rows import (
    at,
    body,
    edge_columns,
    load_logits,
    load_row,
    split_row,
    tile,
    unspecialized,
)

STEEPEST = tl.constexpr(1.0e30)  # for log p/q = inf: the other columns keep a finite gradient


@triton.jit
def _load_grad(ptr, offset, read):
    """Load a row's incoming gradient; 0 where there is none, or the row is not read."""
    if ptr is not None:
        return tl.load(ptr + offset, mask=read, other=0.0)
    else:
        return 0.0


@triton.jit
def _row_weights(stats_row, g_logprob, g_entropy, g_kl, inv_temperature,
                 WITH_H: tl.constexpr, WITH_KL: tl.constexpr):  # fmt: skip
    """Return x, y, k of dz = p·(x + y·log₂p + k·(log₂p − log₂q)) at all columns but the token's."""
    x = -g_logprob
    if WITH_H:
        x -= g_entropy * LN_2 * tl.load(stats_row + 2)
    if WITH_KL:
        kl = tl.load(stats_row + 5)
        x -= g_kl * LN_2 * tl.where(kl == float("inf"), 0.0, kl)
    scale = LN_2 * inv_temperature
    return x * inv_temperature, -g_entropy * scale, g_kl * scale


@triton.jit
def _write(
    row_ptr, ref_row_ptr, grad_row_ptr, column, mask, read, token,
    log2_scale, m, log2_total, m_ref, log2_ref_total, x, y, k, at_token,
    logits_column, ref_column, grad_column,
    UNIT: tl.constexpr, WITH_TOKEN: tl.constexpr, WITH_H: tl.constexpr, WITH_KL: tl.constexpr,
):  # fmt: skip
    """Write the gradient at some columns; zeros, without reading, if the row is not to be read."""
    z = load_logits(row_ptr, column, logits_column, mask & read, UNIT)
    log_p = (z - m) * log2_scale - log2_total
    p = tl.exp2(log_p)
    weight = x
    if WITH_H:
        weight += y * log_p
    if WITH_KL:
        z_ref = load_logits(ref_row_ptr, column, ref_column, mask & read, UNIT)
        log_q = (z_ref - m_ref) * log2_scale - log2_ref_total
        weight += k * tl.minimum(log_p - log_q, STEEPEST)
    dz = p * weight
    if WITH_H or WITH_KL:
        dz = tl.where(p == 0, 0.0, dz)  # a banned token's log p is −inf
    if WITH_TOKEN:
        dz = tl.where(column == token, dz + at_token, dz)
    tl.store(at(grad_row_ptr, column, grad_column, UNIT), dz, mask=mask)


@unspecialized
def backward_kernel(
    logits_ptr, ref_ptr, tokens_ptr, mask_ptr, stats_ptr,
    g_logprob_ptr, g_entropy_ptr, g_kl_ptr, grad_ptr,
    inner_size, columns, all_columns, chunks, log2_scale, inv_temperature,
    logits_outer: tl.int64, logits_inner: tl.int64, logits_column: tl.int64,
    ref_outer: tl.int64, ref_inner: tl.int64, ref_column: tl.int64,
    token_outer: tl.int64, token_inner: tl.int64, mask_outer: tl.int64, mask_inner: tl.int64,
    g_logprob_outer: tl.int64, g_logprob_inner: tl.int64,
    g_entropy_outer: tl.int64, g_entropy_inner: tl.int64,
    g_kl_outer: tl.int64, g_kl_inner: tl.int64,
    grad_outer: tl.int64, grad_inner: tl.int64, grad_column: tl.int64, stats_width,
    UNIT: tl.constexpr, REF_ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
    VEC: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write TILES tiles of one row's gradient; the first chunk writes the row's edge as well."""
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    outer, inner = (row // inner_size).to(tl.int64), (row % inner_size).to(tl.int64)
    token_at = outer * token_outer + inner * token_inner
    mask_at = outer * mask_outer + inner * mask_inner
    token, _, read = load_row(tokens_ptr, mask_ptr, token_at, mask_at, columns)
    token = tl.where(read, token, -1).to(tl.int32)

    WITH_TOKEN: tl.constexpr = g_logprob_ptr is not None
    WITH_H: tl.constexpr = g_entropy_ptr is not None
    WITH_KL: tl.constexpr = g_kl_ptr is not None
    g_logprob = _load_grad(g_logprob_ptr, outer * g_logprob_outer + inner * g_logprob_inner, read)
    g_entropy = _load_grad(g_entropy_ptr, outer * g_entropy_outer + inner * g_entropy_inner, read)
    g_kl = _load_grad(g_kl_ptr, outer * g_kl_outer + inner * g_kl_inner, read)
    stats_row = stats_ptr + row.to(tl.int64) * stats_width
    m, log2_total = tl.load(stats_row), tl.load(stats_row + 1)
    m_ref, log2_ref_total = m, log2_total
    if WITH_KL:
        m_ref, log2_ref_total = tl.load(stats_row + 3), tl.load(stats_row + 4)
    x, y, k = _row_weights(stats_row, g_logprob, g_entropy, g_kl, inv_temperature, WITH_H, WITH_KL)
    at_token = g_logprob * inv_temperature

    row_ptr = logits_ptr + outer * logits_outer + inner * logits_inner
    grad_row_ptr = grad_ptr + outer * grad_outer + inner * grad_inner
    ref_row_ptr = row_ptr
    if WITH_KL:
        ref_row_ptr = ref_ptr + outer * ref_outer + inner * ref_inner
    head, granules = split_row(row_ptr, columns, UNIT, VEC)
    edge = edge_columns(head, granules, LANES, VEC)
    _write(
        row_ptr, ref_row_ptr, grad_row_ptr, edge, (edge < columns) & (chunk == 0), read, token,
        log2_scale, m, log2_total, m_ref, log2_ref_total, x, y, k, at_token,
        logits_column, ref_column, grad_column, UNIT, WITH_TOKEN, WITH_H, WITH_KL,
    )  # fmt: skip

    body_ptr = body(row_ptr, head, UNIT)
    ref_body_ptr = body(ref_row_ptr, head, REF_ALIGNED)
    grad_body_ptr = body(grad_row_ptr, head, GRAD_ALIGNED)
    first = chunk * (TILES * UNROLL * LANES)
    for start in range(first, tl.minimum(first + TILES * UNROLL * LANES, granules), UNROLL * LANES):
        granule, column = tile(start, UNROLL * LANES, VEC)
        _write(
            body_ptr, ref_body_ptr, grad_body_ptr, column, granule < granules, read, token - head,
            log2_scale, m, log2_total, m_ref, log2_ref_total, x, y, k, at_token,
            logits_column, ref_column, grad_column, UNIT, WITH_TOKEN, WITH_H, WITH_KL,
        )  # fmt: skip
    for start in range(columns + chunk * LANES, all_columns, chunks * LANES):
        padding = start + tl.arange(0, LANES)
        zeros = tl.zeros((LANES,), tl.float32)
        tl.store(at(grad_row_ptr, padding, grad_column, UNIT), zeros, mask=padding < all_columns)
