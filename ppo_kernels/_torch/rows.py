"""Rows of logits that live for the length of one chunk: reduce them, then turn them to gradients.

The same arithmetic as `logits.py`, for a caller who owns the logits: nothing is allocated but a
piece that stays in the cache, the sums of the forward pass are handed to the backward pass, and
the gradient takes the logits' place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

NATS = 1.0
"""What a unit of the sums in `stats` is worth in nats."""

_CPU_PIECE_BYTES = 4 << 20  # 16 and 1 MiB take 10 to 20 % longer on one core of an EPYC (Zen 4)
_GPU_PIECE_BYTES = 1 << 26
_IGNORE_INDEX = -100
_LOWEST = -1e4  # e^−1e4 is 0, and finite: 0·log 0 is 0
_STEEPEST = 1e30  # for log π/π_ref = ∞: the other columns keep a finite gradient


def forward_rows(
    logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log π(a) [n], H [n] if wanted, and [n, 3]: max logit, log Σ e^(z − max), H."""
    counted, valid, index = _positions(tokens, logits.shape[1])
    stats = torch.empty(len(logits), 3, dtype=_wide(logits), device=logits.device)
    logprobs, entropy = torch.empty_like(stats[:, 0]), torch.empty_like(stats[:, 0])
    for piece, (t, *spare) in _pieces(logits, 2 if with_entropy else 1):
        top = logits[piece].amax(-1, keepdim=True).to(t.dtype)
        _distance(logits[piece], top, temperature, t)
        at_token = t.gather(1, index[piece])
        e = torch.exp(t, out=spare[0] if with_entropy else t)
        s = e.sum(-1, keepdim=True)
        log_s = s.log()
        logprobs[piece] = (at_token - log_s).squeeze(1)
        h = log_s
        if with_entropy:
            h = log_s - t.clamp_(min=_LOWEST).mul_(e).sum(-1, keepdim=True) / s
            entropy[piece] = h.squeeze(1)
        stats[piece] = torch.cat([top, log_s, h], 1)
    logprobs.masked_fill_(~valid, torch.nan).masked_fill_(~counted, 0)
    if not with_entropy:
        return logprobs, None, stats
    return logprobs, entropy.masked_fill_(~valid, torch.nan).masked_fill_(~counted, 0), stats


def backward_rows_(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    stats: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
) -> None:
    """Replace logits by dz = [g_lp·(1{a} − π) − g_H·π·(log π + H)]/τ, rounded once."""
    _, valid, index = _positions(tokens, logits.shape[1])
    top, log_s, h = (stats[:, i, None] for i in range(3))
    # One subtraction instead of two: where |max| ≫ log Σ it rounds like the logits themselves.
    shift = top + log_s * temperature
    g_lp = _incoming(g_logprobs, valid, temperature)
    g_h = _incoming(g_entropy, valid, temperature)
    in_place = logits.dtype == stats.dtype
    all_valid = valid.device.type == "cpu" and bool(valid.all())  # elsewhere looking would wait
    for piece, (p, buffer) in _pieces(logits, 2):
        log_p = logits[piece] if in_place else buffer
        _distance(logits[piece], shift[piece], temperature, log_p)
        if g_h is None:
            dz = log_p.exp_() if g_lp is None else log_p.exp_().mul_(-g_lp[piece])
        else:
            torch.exp(log_p, out=p)
            constant = -g_h[piece] * h[piece] - (0 if g_lp is None else g_lp[piece])
            dz = log_p.clamp_(min=_LOWEST).mul_(-g_h[piece]).add_(constant).mul_(p)
        if g_lp is not None:
            dz.scatter_add_(1, index[piece], g_lp[piece].to(dz.dtype))
        if not all_valid:
            dz.masked_fill_(~valid[piece, None], 0)
        if not in_place:
            logits[piece] = dz


def forward_pair_rows(
    logits: Tensor, ref_logits: Tensor, counted: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return KL(π‖π_ref) [n], and [n, 5]: max and log Σ of both, KL."""
    stats = torch.empty(len(logits), 5, dtype=_wide(logits), device=logits.device)
    for piece, (t, t_ref, e) in _pieces(logits, 3):
        tops, log_s, sums = [], [], []
        for x, distance in ((logits[piece], t), (ref_logits[piece], t_ref)):
            tops.append(x.amax(-1, keepdim=True).to(t.dtype))
            _distance(x, tops[-1], temperature, distance)
            sums.append(torch.exp(distance, out=e).sum(-1, keepdim=True))
            log_s.append(sums[-1].log())
        torch.exp(t, out=e)
        t.sub_(t_ref).add_(log_s[1] - log_s[0]).masked_fill_(e == 0, 0)
        kl = t.mul_(e).sum(-1, keepdim=True) / sums[0]
        stats[piece] = torch.cat([tops[0], log_s[0], tops[1], log_s[1], kl], 1)
    return torch.where(counted, stats[:, 4], 0), stats


def backward_pair_rows_(
    logits: Tensor,
    ref_logits: Tensor,
    counted: Tensor,
    temperature: float,
    stats: Tensor,
    g_kl: Tensor,
) -> None:
    """Replace logits by dz = g_KL·π·(log π − log π_ref − KL)/τ."""
    top, log_s, top_ref, log_s_ref, kl = (stats[:, i, None] for i in range(5))
    kl = torch.where(kl == torch.inf, 0, kl)
    g = torch.where(counted, g_kl, 0)[:, None] / temperature
    for piece, (log_p, log_q, p) in _pieces(logits, 3):
        _distance(logits[piece], top[piece], temperature, log_p).sub_(log_s[piece])
        _distance(ref_logits[piece], top_ref[piece], temperature, log_q).sub_(log_s_ref[piece])
        torch.exp(log_p, out=p)
        difference = log_p.sub_(log_q).clamp_(max=_STEEPEST).sub_(kl[piece])
        dz = difference.mul_(p).mul_(g[piece]).masked_fill_(p == 0, 0)
        logits[piece] = dz.masked_fill_(~counted[piece, None], 0)


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
) -> Tensor:
    """Return d/dlogprobs of Σ w·max(−Âρ, −Â·clip(ρ)); 0 where the weight is 0."""
    counted = weights != 0
    a = torch.where(counted, advantages, 0).to(logprobs.dtype)
    log_ratio = torch.where(counted, logprobs - old_logprobs, 0)
    ratio = log_ratio.clamp(max=40.0).exp()  # ρ² still fits in float32
    unclipped, clipped = -a * ratio, -a * ratio.clamp(1 - cliprange, 1 + cliprange_high)
    flat = unclipped < clipped
    if dual_clip is not None:
        flat |= (a < 0) & (unclipped > -dual_clip * a)
    return torch.where(flat | ~counted, 0, weights * unclipped)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _pieces(logits: Tensor, n_buffers: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Rows that fit in the cache, and buffers of their shape to compute in."""
    n, columns = logits.shape
    dtype = _wide(logits)
    size = _CPU_PIECE_BYTES if logits.device.type == "cpu" else _GPU_PIECE_BYTES
    rows = min(max(1, size // (columns * dtype.itemsize)), max(n, 1))
    buffers = logits.new_empty((n_buffers, rows, columns), dtype=dtype)
    for start in range(0, n, rows):
        yield slice(start, start + rows), [b[: n - start] for b in buffers]


def _distance(x: Tensor, origin: Tensor, temperature: float, out: Tensor) -> Tensor:
    """(x − origin)/τ"""
    torch.sub(x, origin, out=out)
    return out if temperature == 1 else out.div_(temperature)


def _incoming(g: Tensor | None, valid: Tensor, temperature: float) -> Tensor | None:
    return None if g is None else torch.where(valid, g, 0)[:, None] / temperature


def _positions(tokens: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows count; which of them have a token that is a column; that column [n, 1]."""
    counted = tokens != _IGNORE_INDEX
    valid = counted & (tokens >= 0) & (tokens < columns)
    return counted, valid, torch.where(valid, tokens, 0)[:, None]
