"""Device functions that walk a row of logits: a head, 16-byte granules, and the rest.

A row may start at any element. Its first columns, fewer than VEC, lead up to a 16-byte boundary;
from there on granules of VEC columns are one 128-bit access each, whatever V is; the last columns
do not fill a granule. Head and rest together are fewer than 2·VEC columns, the "edge": one for each
of the first lanes. Where the columns are not adjacent there is no head, and accesses are narrow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

IGNORE_INDEX = tl.constexpr(-100)
GRANULE_BYTES = tl.constexpr(16)


def unspecialized(kernel: Callable[..., None]) -> Any:
    """Compile a kernel once for all sizes, strides and addresses.

    Triton would compile anew for a size or stride of 1 and for multiples of 16, and a row here is
    cut by its address while the kernel runs: there is nothing to gain from knowing more.
    """
    parameters = inspect.signature(kernel).parameters.values()
    runtime = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(kernel, do_not_specialize=runtime)


@triton.jit
def split_row(row_ptr, columns, UNIT: tl.constexpr, VEC: tl.constexpr):
    """Return the length of the head, and the number of granules after it."""
    head = 0
    if UNIT:
        to_boundary = (-row_ptr.to(tl.int64)) & (GRANULE_BYTES - 1)
        head = tl.minimum((to_boundary // (GRANULE_BYTES // VEC)).to(tl.int32), columns)
    return head, (columns - head) // VEC


@triton.jit
def edge_columns(head, granules, LANES: tl.constexpr, VEC: tl.constexpr):
    """Return [LANES, 1]: the columns of the edge, then columns past the end of the row."""
    lane = tl.arange(0, LANES)[:, None]
    return tl.where(lane < head, lane, lane + granules * VEC)


@triton.jit
def tile(start, SIZE: tl.constexpr, VEC: tl.constexpr):
    """Return a tile's granules [SIZE, 1] and its columns [SIZE, VEC].

    The mask of a load depends on the granule only: that keeps a masked load 128 bits wide.
    """
    granule = start + tl.arange(0, SIZE)[:, None]
    return granule, granule * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def by_lane(x, LANES: tl.constexpr):
    """Reshape [UNROLL·LANES, VEC] to [UNROLL, LANES, VEC]; the middle dimension is the thread.

    Loaded in two dimensions, a granule is one thread's and neighbouring threads hold neighbouring
    granules. Loaded in three, some versions of Triton give UNROLL to threads instead.
    """
    return tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1]))


@triton.jit
def body(row_ptr, head, ALIGNED: tl.constexpr):
    """Return the address of the first granule, with its alignment made known to the compiler."""
    body_ptr = row_ptr + head
    if ALIGNED:
        body_ptr = tl.multiple_of(body_ptr, 16)
    return body_ptr


@triton.jit
def at(ptr, column, stride, UNIT: tl.constexpr):
    if UNIT:
        return ptr + column
    else:
        return ptr + column.to(tl.int64) * stride


@triton.jit
def load_logits(ptr, column, stride, mask, UNIT: tl.constexpr):
    """Load logits as float32, -inf (a banned token) where the mask is False."""
    return tl.load(at(ptr, column, stride, UNIT), mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def load_row(tokens_ptr, mask_ptr, token_at, mask_at, columns):
    """Return the row's token (0 without tokens), whether it counts, and whether to read it."""
    token = tl.zeros((), tl.int64)
    counted = token == 0
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + token_at)
        counted = token != IGNORE_INDEX
    if mask_ptr is not None:
        counted = counted & (tl.load(mask_ptr + mask_at) != 0)
    return token, counted, counted & (token >= 0) & (token < columns)


@triton.jit
def store_row(ptr, row, x, counted, read):
    """Store a row's result: 0 where it does not count, NaN where its token is no column."""
    tl.store(ptr + row, tl.where(counted, tl.where(read, x, float("nan")), 0.0))
