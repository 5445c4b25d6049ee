"""Pieces of logits that fit in the cache, and the arithmetic on one of them, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CPU_PIECE_BYTES = 1 << 20  # L2 of one core; 0.25 to 4 MiB differ by 10 %
GPU_PIECE_BYTES = 1 << 26

# Below it a probability is 0 in float32 and in float64; it is finite, so that 0·log 0 is 0.
_LOWEST = -1e4


class Scratch:
    """Buffers for one piece of the logits, allocated when first asked for."""

    def __init__(self, like: Tensor, temperature: float, columns: int) -> None:
        size = CPU_PIECE_BYTES if like.device.type == "cpu" else GPU_PIECE_BYTES
        self.rows = max(1, size // (columns * like.element_size()))
        self._like, self._columns, self._temperature = like, columns, temperature
        self._buffers: dict[int, Tensor] = {}

    def get(self, slot: int, rows: int) -> Tensor:
        """Return the buffer of this slot, [rows, columns]."""
        if slot not in self._buffers:
            self._buffers[slot] = self._like.new_empty((self.rows, self._columns))
        return self._buffers[slot][:rows]

    def scaled(self, x: Tensor, slot: int) -> Tensor:
        """Return z = x/τ without padding columns: x itself where nothing is to be done."""
        x = x[:, : self._columns]
        if x.dtype == self._like.dtype and self._temperature == 1:
            return x
        z = self.get(slot, len(x)).copy_(x)
        return z if self._temperature == 1 else z.div_(self._temperature)


def row_pieces(rows: int, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Cut tensors that share their leading dimensions into views of at most `rows` rows.

    The first is [..., V], the others [...] or [..., V]; None stays None. Nothing is copied,
    whatever the strides.
    """
    leading = tensors[0].shape[:-1]
    if len(leading) == 0:
        yield tuple(None if t is None else t[None] for t in tensors)
    elif len(leading) == 1:
        for start in range(0, leading[0], rows):
            yield tuple(None if t is None else t[start : start + rows] for t in tensors)
    else:
        depth = len(leading)
        try:
            flat = [
                None if t is None else t.view(leading.numel(), *t.shape[depth:]) for t in tensors
            ]
        except RuntimeError:  # strides that one row index cannot follow
            axis = min(range(depth), key=leading.__getitem__)
            for i in range(leading[axis]):
                yield from row_pieces(
                    rows, *(None if t is None else t.select(axis, i) for t in tensors)
                )
        else:
            yield from row_pieces(rows, *flat)


def statistics_of_piece(
    scratch: Scratch,
    x: Tensor,
    x_ref: Tensor | None,
    a: Tensor,
    logprobs: Tensor | None,
    entropy: Tensor | None,
    kl: Tensor | None,
    ref_logprobs: Tensor | None,
) -> None:
    """Fill the rows of the outputs that are there."""
    t = _shifted(scratch.scaled(x, 0), scratch.get(0, len(x)))
    at_token = t.gather(1, a)
    e = torch.exp(t, out=scratch.get(1, len(x)))  # π = e/s
    s = e.sum(-1, keepdim=True)
    log_s = s.log()
    if logprobs is not None:
        logprobs.copy_((at_token - log_s).squeeze(1))
    if entropy is not None or x_ref is not None:
        t.clamp_(min=_LOWEST)
    if x_ref is not None and kl is not None:
        t_ref = _shifted(scratch.scaled(x_ref, 2), scratch.get(2, len(x)))
        at_token = t_ref.gather(1, a)
        log_s_ref = torch.exp(t_ref, out=scratch.get(3, len(x))).sum(-1, keepdim=True).log()
        if ref_logprobs is not None:
            ref_logprobs.copy_((at_token - log_s_ref).squeeze(1))
        difference = torch.sub(t, t_ref, out=t_ref).add_(log_s_ref - log_s)  # log π/π_ref
        difference.masked_fill_(e == 0, 0)
        kl.copy_((difference.mul_(e).sum(-1, keepdim=True) / s).squeeze(1))
    if entropy is not None:
        entropy.copy_((log_s - t.mul_(e).sum(-1, keepdim=True) / s).squeeze(1))


def gradient_of_piece(
    scratch: Scratch,
    x: Tensor,
    x_ref: Tensor | None,
    a: Tensor,
    g_lp: Tensor | None,
    g_h: Tensor | None,
    g_kl: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """dz = g_lp·1[a] + p·(w − Σ p·w − g_lp),  w = g_KL·(log p − log q) − g_H·log p.

    The bracket does not see a constant in w, so log p and log q need no logsumexp. w is finite
    where only q is 0 (the true slope is infinite).
    """
    rows = len(x)
    z = scratch.scaled(x, 0)
    p = torch.softmax(z, -1, out=scratch.get(1, rows) if out is None else out)
    factor = p.sum(-1, keepdim=True).reciprocal_()  # not quite 1: see logits.py
    if g_h is None and g_kl is None:
        assert g_lp is not None
        dz = p.mul_(factor.mul_(-g_lp[:, None]))
    else:
        w = _shifted(z, scratch.get(0, rows)).clamp_(min=_LOWEST)
        if g_kl is not None and x_ref is not None:
            z_ref = scratch.scaled(x_ref, 2)
            t_ref = _shifted(z_ref, scratch.get(2, rows)).clamp_(min=_LOWEST)
            difference = torch.sub(w, t_ref, out=t_ref).mul_(g_kl[:, None])
            w = difference if g_h is None else difference.sub_(w.mul_(g_h[:, None]))
        elif g_h is not None:
            w.mul_(g_h[:, None]).neg_()
        centre = torch.mul(p, w, out=scratch.get(3, rows)).sum(-1, keepdim=True).mul_(factor)
        if g_lp is not None:
            centre += g_lp[:, None]
        dz = p.mul_(w.sub_(centre)).mul_(factor)
    return dz if g_lp is None else dz.scatter_(1, a, dz.gather(1, a) + g_lp[:, None])


def _shifted(z: Tensor, out: Tensor) -> Tensor:
    """z minus the maximum of its row."""
    return torch.sub(z, z.amax(-1, keepdim=True), out=out)
