"""Registration of the launchers over logits as custom ops, for `torch.compile`.

A result that was not asked for is an empty tensor: an op's schema has no optional outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels._triton.logits_launch import Grads, backward, empty_grad, forward, forward_pair


@torch.library.custom_op("ppo_kernels::token_logprobs", mutates_args=())
def _token_logprobs_op(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy, stats = forward(
        logits, tokens, temperature, columns, response_mask, with_entropy
    )
    return logprobs, stats.new_empty(0) if entropy is None else entropy, stats


@_token_logprobs_op.register_fake
def _(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.new_empty(tokens.shape, dtype=torch.float32)
    entropy = logprobs.new_empty(tokens.shape if with_entropy else 0)
    return logprobs, entropy, logprobs.new_empty(tokens.numel(), 3)


@torch.library.custom_op("ppo_kernels::token_statistics", mutates_args=())
def _token_statistics_op(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = forward_pair(logits, ref_logits, tokens, temperature, columns, response_mask)
    stats = results[-1]
    logprobs, entropy, kl, ref_logprobs, _ = (
        stats.new_empty(0) if x is None else x for x in results
    )
    return logprobs, entropy, kl, ref_logprobs, stats


@_token_statistics_op.register_fake
def _(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kl = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    logprobs, entropy, ref_logprobs = (
        kl.new_empty(0 if tokens is None else kl.shape) for _ in range(3)
    )
    return logprobs, entropy, kl, ref_logprobs, kl.new_empty(kl.numel(), 6)


@torch.library.custom_op("ppo_kernels::logits_backward", mutates_args=())
def _backward_op(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    response_mask: Tensor | None,
    stats: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
    g_kl: Tensor | None,
) -> Tensor:
    grad, grads = empty_grad(logits), Grads(g_logprobs, g_entropy, g_kl)
    backward(logits, ref_logits, tokens, temperature, columns, response_mask, stats, grads, grad)
    return grad


@_backward_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return empty_grad(logits)


def _save_logprobs(ctx: Any, inputs: Any, output: Any) -> None:
    logits, tokens, ctx.temperature, ctx.columns, mask, ctx.with_entropy = inputs
    _, entropy, stats = output
    ctx.mark_non_differentiable(*([stats] if ctx.with_entropy else [entropy, stats]))
    ctx.save_for_backward(logits, tokens, mask, stats)


def _logprobs_backward(ctx: Any, g_logprobs: Tensor, g_entropy: Tensor, _: Any) -> Any:
    logits, tokens, mask, stats = ctx.saved_tensors
    g_entropy = g_entropy if ctx.with_entropy else None
    grad = torch.ops.ppo_kernels.logits_backward(
        logits, None, tokens, ctx.temperature, ctx.columns, mask, stats, g_logprobs, g_entropy, None
    )
    return grad, None, None, None, None, None


def _save_statistics(ctx: Any, inputs: Any, output: Any) -> None:
    logits, ref_logits, tokens, ctx.temperature, ctx.columns, mask = inputs
    logprobs, entropy, _, ref_logprobs, stats = output
    absent = [logprobs, entropy] if tokens is None else []
    ctx.mark_non_differentiable(ref_logprobs, stats, *absent)
    ctx.save_for_backward(logits, ref_logits, tokens, mask, stats)


def _statistics_backward(
    ctx: Any, g_logprobs: Tensor, g_entropy: Tensor, g_kl: Tensor, *_: Any
) -> Any:
    logits, ref_logits, tokens, mask, stats = ctx.saved_tensors
    of_tokens = (None, None) if tokens is None else (g_logprobs, g_entropy)
    grad = torch.ops.ppo_kernels.logits_backward(
        logits, ref_logits, tokens, ctx.temperature, ctx.columns, mask, stats, *of_tokens, g_kl
    )
    return grad, None, None, None, None, None


_token_logprobs_op.register_autograd(_logprobs_backward, setup_context=_save_logprobs)
_token_statistics_op.register_autograd(_statistics_backward, setup_context=_save_statistics)
