"""GAE without a loop over time: a scan by doubling over the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor

_CPU_PIECE_BYTES = 1 << 20  # rows at a time on a CPU: every pass of the scan stays in L2


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor | None,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns)."""
    given = (rewards, values) if bootstrap_values is None else (rewards, values, bootstrap_values)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32
    batch, length = values.shape
    advantages = torch.zeros(batch, length, dtype=dtype, device=values.device)
    returns = torch.zeros_like(advantages)
    rows = max(batch, 1)
    if values.device.type == "cpu" and length:
        rows = max(1, _CPU_PIECE_BYTES // (length * advantages.element_size()))
    for start in range(0, batch, rows):
        piece = slice(start, start + rows)
        r, v = rewards[piece].to(dtype), values[piece].to(dtype)
        last = v.new_zeros(len(v)) if bootstrap_values is None else bootstrap_values[piece].to(v)
        if response_mask is None:
            v_next = torch.cat([v[:, 1:], last[:, None]], 1) if length else v
            a = _discounted_suffix_sums(r + gamma * v_next - v, gamma * gae_lambda)
            advantages[piece], returns[piece] = a, a + v
        else:
            a = _gae_of_counted(r, v, response_mask[piece], gamma, gae_lambda, last)
            advantages[piece] = a
            returns[piece] = torch.where(response_mask[piece], a + v, 0)
    return advantages, returns


def _gae_of_counted(
    r: Tensor, v: Tensor, mask: Tensor, gamma: float, gae_lambda: float, last: Tensor
) -> Tensor:
    """Move what counts to the left, without holes, scan it there, and move it back."""
    batch, length = v.shape
    place = mask.cumsum(1) - 1
    lengths = mask.sum(1, keepdim=True)
    # Columns: `length` tokens, room for the bootstrap value after them, and the rest's dump.
    target = torch.where(mask, place, length + 1)
    dense_r = r.new_zeros(batch, length + 2).scatter_(1, target, r)
    dense_v = v.new_zeros(batch, length + 2).scatter_(1, target, v)
    dense_v.scatter_(1, lengths, last[:, None])
    delta = dense_r[:, :length] + gamma * dense_v[:, 1 : length + 1] - dense_v[:, :length]
    exists = torch.arange(length, device=v.device) < lengths
    a = _discounted_suffix_sums(torch.where(exists, delta, 0), gamma * gae_lambda)
    return torch.where(mask, a.gather(1, place.clamp(min=0)), 0)


def _discounted_suffix_sums(x: Tensor, decay: float) -> Tensor:
    """Σ_{k≥0} decay^k·x_{t+k}: after a step of size s, sums over 2s terms are there."""
    step = 1
    while step < x.shape[1]:
        head = torch.add(x[:, :-step], x[:, step:], alpha=decay**step)
        x = torch.cat([head, x[:, -step:]], 1)
        step *= 2
    return x
