"""Log-probabilities, entropy and exact KL from logits: autograd and entries.

In eager mode an `autograd.Function` calls the launchers directly: the boundary of a custom op costs
about 60 µs a call. Under `torch.compile` the same launchers run as the custom ops of `logits_ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ppo_kernels._triton import logits_ops as logits_ops  # registers the custom ops
from ppo_kernels._triton.logits_launch import (
    Grads,
    backward,
    compile_specs,
    empty_grad,
    forward,
    forward_pair,
)

__all__ = [
    "categorical_kl",
    "compile_specs",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_statistics",
]


class _DifferentiatedOnce(torch.autograd.Function):
    """Let a gradient pass that a graph is built of, and raise if that graph is differentiated.

    `once_differentiable` would raise only if the incoming gradient depends on something, and let a
    gradient penalty on a plain loss pass as a constant.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RuntimeError(
            "log-probabilities, entropy and KL from logits are differentiable once; "
            "use impl='reference' for second derivatives"
        )


def _once(grad: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # no create_graph
        return grad
    return _DifferentiatedOnce.apply(grad.detach().requires_grad_())


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        columns: int,
        response_mask: Tensor | None,
        with_entropy: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, stats = forward(
            logits, tokens, temperature, columns, response_mask, with_entropy
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, tokens, response_mask, stats)
        ctx.temperature, ctx.columns, ctx.inplace = temperature, columns, inplace_backward
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None) -> Any:
        # saved_tensors raises if somebody has changed the logits: a second in-place backward too.
        logits, tokens, mask, stats = ctx.saved_tensors
        grad = logits.detach() if ctx.inplace else empty_grad(logits)
        grads = Grads(g_logprobs, g_entropy)
        backward(
            logits, None, tokens, ctx.temperature, ctx.columns, mask, stats, grads, grad_logits=grad
        )
        if ctx.inplace:
            increment_version(logits)
        return _once(grad), None, None, None, None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        tokens: Tensor | None,
        temperature: float,
        columns: int,
        response_mask: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        *results, stats = forward_pair(
            logits, ref_logits, tokens, temperature, columns, response_mask
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, ref_logits, tokens, response_mask, stats)
        ctx.temperature, ctx.columns = temperature, columns
        if tokens is not None:
            ctx.mark_non_differentiable(results[3])
        return tuple(results)

    @staticmethod
    def backward(
        ctx: Any,
        g_logprobs: Tensor | None,
        g_entropy: Tensor | None,
        g_kl: Tensor | None,
        _: Tensor | None,
    ) -> Any:
        logits, ref_logits, tokens, mask, stats = ctx.saved_tensors
        grad, grads = empty_grad(logits), Grads(g_logprobs, g_entropy, g_kl)
        backward(logits, ref_logits, tokens, ctx.temperature, ctx.columns, mask, stats, grads, grad)
        return _once(grad), None, None, None, None, None


def _mergeable(x: Tensor) -> Tensor:
    """Copy logits whose dimensions before the last two do not merge to one; rare, and traceable."""
    size, stride = x.shape, x.stride()
    merges = all(stride[i] == size[i + 1] * stride[i + 1] for i in range(x.dim() - 3))
    return x if merges else x.contiguous()


def _token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    columns: int,
    mask: Tensor | None,
    with_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Any]:
    logits = _mergeable(logits)
    arguments = (logits, tokens, temperature, columns, mask, with_entropy)
    if torch.compiler.is_compiling():
        return torch.ops.ppo_kernels.token_logprobs(*arguments)[:2]
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return forward(*arguments)[:2]
    return _TokenLogprobs.apply(*arguments, inplace_backward)


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
    inplace_backward: bool,
) -> Tensor:
    return _token_logprobs(
        logits, tokens, temperature, vocab_size, response_mask, False, inplace_backward
    )[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    return _token_logprobs(
        logits, tokens, temperature, vocab_size, response_mask, True, inplace_backward
    )


def _statistics(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor | None,
    temperature: float,
    columns: int,
    mask: Tensor | None,
) -> tuple[Any, Any, Tensor, Any]:
    logits = _mergeable(logits)
    arguments = (logits, ref_logits.detach(), tokens, temperature, columns, mask)
    if torch.compiler.is_compiling():
        return torch.ops.ppo_kernels.token_statistics(*arguments)[:4]
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return forward_pair(*arguments)[:4]
    return _Statistics.apply(*arguments)


def categorical_kl(
    logits: Tensor,
    ref_logits: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
) -> Tensor:
    return _statistics(logits, ref_logits, None, temperature, vocab_size, response_mask)[2]


def token_statistics(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _statistics(logits, ref_logits, tokens, temperature, vocab_size, response_mask)
