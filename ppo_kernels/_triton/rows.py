"""Rows of logits that live for the length of one chunk, by the kernels over logits.

The interface is that of `_torch/rows.py`: the caller owns the logits, the gradient takes their
place, and the sums pass through his hands. Nothing here is recorded by autograd.
"""

from __future__ import annotations

import math

from torch import Tensor

from ppo_kernels._triton.logits_launch import Grads, backward, forward, forward_pair
from ppo_kernels._triton.losses import NO_DUAL_CLIP, _launch_clipped_losses

NATS = math.log(2)
"""What a unit of the sums in `stats` is worth in nats."""


def forward_rows(
    logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    return forward(logits, tokens, temperature, logits.shape[1], None, with_entropy)


def backward_rows_(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    stats: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
) -> None:
    grads = Grads(g_logprobs, g_entropy)
    backward(logits, None, tokens, temperature, logits.shape[1], None, stats, grads, logits)


def forward_pair_rows(
    logits: Tensor, ref_logits: Tensor, counted: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    results = forward_pair(logits, ref_logits, None, temperature, logits.shape[1], counted)
    return results[2], results[4]


def backward_pair_rows_(
    logits: Tensor,
    ref_logits: Tensor,
    counted: Tensor,
    temperature: float,
    stats: Tensor,
    g_kl: Tensor,
) -> None:
    columns, grads = logits.shape[1], Grads(kl=g_kl)
    backward(logits, ref_logits, None, temperature, columns, counted, stats, grads, logits)


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
) -> Tensor:
    cap = NO_DUAL_CLIP if dual_clip is None else dual_clip
    new, old, a, w = (x[None] for x in (logprobs, old_logprobs, advantages, weights))
    grads = _launch_clipped_losses(
        new, None, old, a, None, None, w, cliprange, cliprange_high, cap, 0.0, 0.0, True, False
    )[2]
    return grads[0, 0]
