"""The LM head: a chunk of hidden states to logits, and a chunk of gradients back.

x = h·Wᵀ + b; without a cap the logits are x·s/τ, and x goes to the row kernels with temperature
τ/s; with a cap they are cap·tanh(x·s/cap)/τ, and tanh goes to the row kernels with temperature
τ/cap. So neither scale, nor temperature, nor cap takes a pass over the logits of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels._linear.rows import Chunks, rows_per_chunk

_ALIGNMENT = 16  # bytes at which rows of a chunk start: matmuls and 128-bit loads want it for any V


class Settings(NamedTuple):
    """What a head does besides multiplying."""

    temperature: float
    logit_scale: float
    logit_softcap: float | None
    chunk_bytes: int | None
    dtype: torch.dtype
    """In which the matmuls run and the logits of a chunk are."""


class Head:
    """A head and memory for one chunk of its logits (two where a gradient must pass a cap)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, settings: Settings) -> None:
        self.weight = weight.to(settings.dtype)
        self._bias = None if bias is None else bias.to(settings.dtype)
        cap = settings.logit_softcap
        self.temperature = settings.temperature / (settings.logit_scale if cap is None else cap)
        self.slope = 1.0 if cap is None else settings.logit_scale / cap
        self._capped = cap is not None
        self._buffers: dict[str, Tensor] = {}

    def chunks(self, counted: Tensor, settings: Settings) -> Chunks:
        """Cut the rows so that a chunk of logits takes `chunk_bytes`."""
        row_bytes = len(self.weight) * settings.dtype.itemsize
        return Chunks(counted, rows_per_chunk(settings.chunk_bytes, row_bytes, counted.device))

    def logits(
        self,
        hidden: Tensor,
        chunks: Chunks,
        dtype: torch.dtype,
        kept: Tensor | None = None,
        *,
        again: bool = False,
    ) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Yield (rows, hidden states, x or tanh); the next chunk overwrites the last.

        The first chunks go to `kept`, as many as fit; with `again` they are copied from there.
        """
        spare = 0 if kept is None else len(kept) // max(chunks.size, 1)
        for number, part in enumerate(chunks):
            h = chunks.clean(hidden, part, dtype)
            place = None
            if kept is not None and number < spare:
                place = kept[number * chunks.size :][: len(h), : len(self.weight)]
            if place is not None and again:
                yield part, h, self._buffer("logits", chunks.size)[: len(h)].copy_(place)
                continue
            out = self._buffer("logits", chunks.size)[: len(h)] if place is None else place
            start, beta = (out, 0.0) if self._bias is None else (self._bias, self.slope)
            torch.addmm(start, h, self.weight.t(), beta=beta, alpha=self.slope, out=out)
            yield part, h, out.tanh_() if self._capped else out

    def remember(self, logits: Tensor) -> Tensor | None:
        """Copy what the gradient needs to pass the cap; None without a cap."""
        if not self._capped:
            return None
        return self._buffer("tanh", len(logits))[: len(logits)].copy_(logits)

    def pass_cap_(self, gradient: Tensor, tanh: Tensor | None) -> None:
        """Multiply by d tanh(y)/dy = 1 − tanh²(y)."""
        if tanh is not None:
            torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)

    def _buffer(self, name: str, rows: int) -> Tensor:
        if name not in self._buffers or len(self._buffers[name]) < rows:
            padded = self.weight.new_empty(rows, padded_columns(self.weight))
            self._buffers[name] = padded[:, : len(self.weight)]
        return self._buffers[name]


def padded_columns(weight: Tensor) -> int:
    """V, rounded up so that each row of logits starts at an aligned address."""
    step = max(1, _ALIGNMENT // weight.itemsize)
    return -(-len(weight) // step) * step


class Wanted(NamedTuple):
    """To which inputs a gradient goes; nothing is computed or allocated for the others."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients:
    """Sums of the gradients over chunks: float32 over 16-bit products, cast once, at the end."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks, wanted: Wanted
    ) -> None:
        self._inputs, self._wanted = (hidden, weight, bias), wanted
        self._one_chunk = chunks.count <= 1
        self.hidden = torch.zeros_like(hidden) if wanted.hidden else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, head: Head, part: slice | Tensor, hidden: Tensor, gradient: Tensor) -> None:
        """Add a chunk: its rows, their hidden states, and d loss/dx, [rows, V]."""
        if self.hidden is not None:
            if isinstance(part, slice) and self.hidden.dtype == gradient.dtype:
                torch.mm(gradient, head.weight, out=self.hidden[part])
            else:
                self.hidden[part] = torch.mm(gradient, head.weight).to(self.hidden.dtype)
        if self._wanted.weight:
            self._add_to_weight(gradient.t(), hidden)
        if self._wanted.bias:
            total = gradient.sum(0, dtype=_wide(gradient))
            self.bias = total if self.bias is None else self.bias.add_(total)

    def _add_to_weight(self, gradient: Tensor, hidden: Tensor) -> None:
        first = self.weight is None
        if self.weight is None:
            weight = self._inputs[1]
            alone = self._one_chunk and weight.dtype == gradient.dtype
            dtype = weight.dtype if alone else _wide(gradient)
            self.weight = torch.empty_like(weight, dtype=dtype)
        if self.weight.dtype == gradient.dtype:
            torch.addmm(self.weight, gradient, hidden, beta=not first, out=self.weight)
        elif _multiplies_into_float32(gradient.device):
            total, dtype = self.weight, self.weight.dtype
            torch.addmm(total, gradient, hidden, beta=not first, out_dtype=dtype, out=total)
        elif first:
            self.weight.copy_(torch.mm(gradient, hidden))
        else:
            self.weight.add_(torch.mm(gradient, hidden))

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients in the dtypes of their inputs, no elements where none is wanted."""
        totals = (self.hidden, self.weight, self.bias)
        results = []
        for wanted, x, total in zip(self._wanted, self._inputs, totals, strict=True):
            if not wanted or x is None:
                results.append(self._inputs[0].new_empty(0))
            else:
                results.append(torch.zeros_like(x) if total is None else total.to(x.dtype))
        return results[0], results[1], results[2]


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Wanted
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of the shapes that `Gradients.results` has, for tracing."""
    a, b, c = (
        torch.empty_like(x) if want and x is not None else hidden.new_empty(0)
        for want, x in zip(wanted, (hidden, weight, bias), strict=True)
    )
    return a, b, c


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _multiplies_into_float32(device: torch.device) -> bool:
    """Whether matmuls of 16-bit operands can add to a float32 result (cuBLAS, from Ampere on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
