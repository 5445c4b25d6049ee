"""What the kernels over [B, T] share: tiles, exact moments, and a merge in a fixed order.

Reductions are deterministic. Every program writes its partial sums to its own slot; the program
that finishes last (one integer ticket tells) reads all slots and merges them in the order of the
slots, whoever it is. One launch, no floating-point atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A mean is kept as the unevaluated sum `shift + offset`, so that x − mean = (x − shift) − offset
# loses nothing when the spread is far below the mean. Moments in kernels are therefore
# (count, shift, offset, m2); callers of the operators see (count, mean, m2).


@triton.jit
def tile_index(tile, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows [ROWS, 1] and columns [1, COLS] of a tile, as int64."""
    tiles_per_row = tl.cdiv(n_cols, COLS)
    first_row = (tile // tiles_per_row).to(tl.int64) * ROWS
    first_col = (tile % tiles_per_row).to(tl.int64) * COLS
    rows = first_row + tl.arange(0, ROWS)[:, None]
    cols = first_col + tl.arange(0, COLS)[None, :]
    return rows, cols


@triton.jit
def offsets(rows, cols, row_stride, col_stride, VEC: tl.constexpr):
    """Element offsets; tells the compiler that row_stride is a multiple of VEC."""
    return rows * (row_stride // VEC * VEC) + cols * col_stride


@triton.jit
def load_mask(pointer, rows, cols, row_stride, col_stride, inside, VEC: tl.constexpr):
    """Which tokens count: those inside the bounds when there is no mask."""
    if pointer is None:
        return inside
    else:
        at = offsets(rows, cols, row_stride, col_stride, VEC)
        return tl.load(pointer + at, mask=inside, other=0) != 0


@triton.jit
def load_tile(pointer, rows, cols, row_stride, col_stride, counted, inside, VEC: tl.constexpr):
    """Load as float32; 0 where a token does not count.

    The load is predicated by the bounds alone: a predicate that depends on data would turn
    128-bit loads into scalar ones. The select also stops NaN and inf in masked places.
    """
    at = offsets(rows, cols, row_stride, col_stride, VEC)
    return tl.where(counted, tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def load_rows(pointer, rows, stride, n_rows):
    """One value per row, as float32; 0 when there are none."""
    if pointer is None:
        return tl.zeros(rows.shape, tl.float32)
    else:
        return tl.load(pointer + rows * stride, mask=rows < n_rows, other=0.0).to(tl.float32)


@triton.jit
def tile_moments(x, counted):
    """(count, shift, offset, m2) of the tile; `x` is 0 where not `counted`.

    Corrected two-pass algorithm in registers: offset = Σ(x − shift)/n takes back what rounding
    did to shift = Σx/n (Chan, Golub & LeVeque 1983, eq. 1.7).
    """
    count = tl.sum(counted.to(tl.int32)).to(tl.float32)
    divisor = tl.maximum(count, 1.0)
    shift = tl.sum(x) / divisor
    deviation = tl.where(counted, x - shift, 0.0)
    offset = tl.sum(deviation) / divisor
    m2 = tl.sum(deviation * deviation) - offset * offset * count
    return count, shift, offset, tl.where(m2 < 0.0, 0.0, m2)


@triton.jit
def combine_moments(count, shift, offset, m2, other_count, other_shift, other_offset, other_m2):
    """Moments of the union of two sets; the left shift stays unless the left set is empty."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    shift = tl.where(count > 0.0, shift, other_shift)
    offset = tl.where(count > 0.0, offset, other_offset)
    apart = tl.where(other_count > 0.0, (other_shift - shift) + (other_offset - offset), 0.0)
    m2 = m2 + other_m2 + apart * apart * count * share
    return total, shift, offset + apart * share, m2


@triton.jit
def is_last_program(ticket):
    """Whether all other programs have stored their partial results; sets the ticket back to 0."""
    tl.debug_barrier()  # every thread's stores come before the release below
    last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def load_slots(partials, column, first, n_slots, SLOTS: tl.constexpr):
    """One partial result of each program; read from L2, where the other programs' stores are."""
    slot = first + tl.arange(0, SLOTS)
    return tl.load(
        partials + column * n_slots + slot, mask=slot < n_slots, other=0.0, cache_modifier=".cg"
    )


@triton.jit
def sum_slots(partials, column, n_slots, SLOTS: tl.constexpr):
    total = tl.sum(load_slots(partials, column, 0, n_slots, SLOTS))
    for first in range(SLOTS, n_slots, SLOTS):
        total += tl.sum(load_slots(partials, column, first, n_slots, SLOTS))
    return total


@triton.jit
def store_moments(partials, column, slot, n_slots, count, shift, offset, m2):
    tl.store(partials + column * n_slots + slot, count)
    tl.store(partials + (column + 1) * n_slots + slot, shift)
    tl.store(partials + (column + 2) * n_slots + slot, offset)
    tl.store(partials + (column + 3) * n_slots + slot, m2)


@triton.jit
def _merge_moment_slots(partials, column, first, n_slots, SLOTS: tl.constexpr):
    """Two passes over the slots' means, with the same correction as in a tile."""
    count = load_slots(partials, column, first, n_slots, SLOTS)
    shift = load_slots(partials, column + 1, first, n_slots, SLOTS)
    offset = load_slots(partials, column + 2, first, n_slots, SLOTS)
    m2 = load_slots(partials, column + 3, first, n_slots, SLOTS)
    total = tl.sum(count)
    divisor = tl.maximum(total, 1.0)
    joint = tl.sum(count * (shift + offset)) / divisor
    apart = tl.where(count > 0.0, (shift - joint) + offset, 0.0)
    correction = tl.sum(count * apart) / divisor
    joint_m2 = tl.sum(m2 + count * apart * apart) - correction * correction * total
    return total, joint, correction, tl.where(joint_m2 < 0.0, 0.0, joint_m2)


@triton.jit
def merge_moments(partials, column, n_slots, SLOTS: tl.constexpr):
    """(count, shift, offset, m2) over all programs, in the order of their slots."""
    count, shift, offset, m2 = _merge_moment_slots(partials, column, 0, n_slots, SLOTS)
    for first in range(SLOTS, n_slots, SLOTS):
        c, s, o, m = _merge_moment_slots(partials, column, first, n_slots, SLOTS)
        count, shift, offset, m2 = combine_moments(count, shift, offset, m2, c, s, o, m)
    return count, shift, offset, m2
