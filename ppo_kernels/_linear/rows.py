"""What an implementation does with a chunk of logits, and which rows get into a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor

from ppo_kernels.reference import IGNORE_INDEX

CPU_CHUNK_BYTES = 64 << 20
CPU_KEPT_CHUNKS, GPU_KEPT_CHUNKS = 3, 1
"""Chunks of logits that wait for the backward pass, which then does not make them again. On a CPU
the matmul is most of the time: at N = 4096, V = 32000, D = 512 keeping 0, 3, 5 and 8 of 8 chunks
took 3.2, 3.0, 2.8 and 2.5 s on two cores of an EPYC, and full logits 2.7 s."""
GPU_CHUNK_BYTES = 1 << 30
GPU_CHUNK_ROWS = 2048
"""Every chunk reads and writes the whole weight gradient: at V = 128256, D = 4096 and 2048 rows
that is 1 ms beside 8 ms of matmul on an H200 (4.2 GB at 4.3 TB/s, 6.5 TFLOP at 790 TFLOP/s)."""


class RowKernels(Protocol):
    """`_torch/rows.py` or `_triton/rows.py`; equations stand there."""

    NATS: float

    def forward_rows(
        self, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...

    def backward_rows_(
        self,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        stats: Tensor,
        g_logprobs: Tensor | None,
        g_entropy: Tensor | None,
    ) -> None: ...

    def forward_pair_rows(
        self, logits: Tensor, ref_logits: Tensor, counted: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward_pair_rows_(
        self,
        logits: Tensor,
        ref_logits: Tensor,
        counted: Tensor,
        temperature: float,
        stats: Tensor,
        g_kl: Tensor,
    ) -> None: ...

    def policy_gradient(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        cliprange: float,
        cliprange_high: float,
        dual_clip: float | None,
    ) -> Tensor: ...


def row_kernels(impl: str) -> RowKernels:
    """Return the implementation called "torch" or "triton"; imported here, as triton may lack."""
    if impl == "triton":
        from ppo_kernels._triton import rows as triton_rows

        return cast(RowKernels, triton_rows)
    from ppo_kernels._torch import rows as torch_rows

    return cast(RowKernels, torch_rows)


def ignore(tokens: Tensor, response_mask: Tensor | None) -> Tensor:
    """Return tokens that are `IGNORE_INDEX` where the mask is False."""
    return tokens if response_mask is None else torch.where(response_mask, tokens, IGNORE_INDEX)


def flat_hidden(hidden: Tensor) -> Tensor:
    """Return [..., D] as [n, D]."""
    return hidden[None] if hidden.dim() == 1 else hidden.flatten(0, -2)


def rows_per_chunk(chunk_bytes: int | None, row_bytes: int, device: torch.device) -> int:
    """Return how many rows of logits a chunk may have."""
    if chunk_bytes is not None:
        return max(1, chunk_bytes // row_bytes)
    if device.type == "cpu":
        return max(1, CPU_CHUNK_BYTES // row_bytes)
    return max(GPU_CHUNK_ROWS, GPU_CHUNK_BYTES // row_bytes)


def kept_rows(rows: int, row_bytes: int, device: torch.device) -> int:
    """Return how many rows of logits may be kept for the backward pass."""
    chunks = CPU_KEPT_CHUNKS if device.type == "cpu" else GPU_KEPT_CHUNKS
    return min(rows, chunks * rows_per_chunk(None, row_bytes, device))


def _is_readable(device: torch.device) -> bool:
    """Whether Python can look at values without waiting for the device."""
    return device.type == "cpu"


class Chunks:
    """Cut rows into chunks of about equal size.

    On a CPU rows that do not count are left out: they cost no matmul. Elsewhere their number is
    not known without waiting for the device, so they stay in, as zeros.
    """

    def __init__(self, counted: Tensor, most_rows: int) -> None:
        can_look = _is_readable(counted.device)
        self._index = counted.nonzero().squeeze(1) if can_look and not counted.all() else None
        self._keep = None if can_look else counted
        self._rows = len(counted) if self._index is None else len(self._index)
        self.count = -(-self._rows // most_rows)
        self.size = -(-self._rows // max(self.count, 1))

    def __iter__(self) -> Iterator[slice | Tensor]:
        """Yield what picks a chunk's rows out of a tensor over all rows."""
        for start in range(0, self._rows, max(self.size, 1)):
            part = slice(start, min(start + self.size, self._rows))
            yield part if self._index is None else self._index[part]

    def clean(self, x: Tensor, part: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return a chunk of hidden states in which what does not count is 0."""
        chunk = x[part].to(dtype)
        return chunk if self._keep is None else torch.where(self._keep[part, None], chunk, 0)
