"""Log-probabilities, entropy and KL from logits, in pieces that stay in the cache.

Besides the logits and their gradient nothing of their size exists, and nothing is saved for the
backward pass but the inputs: it computes the softmax again, piece by piece. Sums over the
vocabulary are `Tensor.sum` (pairwise); those inside PyTorch's fused softmax run one after the
other, which cost 1e-4 nats in nearly flat rows of 151936 columns on a CPU.

The work is done by two custom operators, so that `torch.compile` sees one node and not a loop.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppo_kernels._torch.pieces import (
    Scratch,
    gradient_of_piece,
    row_pieces,
    statistics_of_piece,
)

_IGNORE_INDEX = -100


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
    inplace_backward: bool,
) -> Tensor:
    """log π(a)."""
    outputs: tuple[Tensor, ...] = _forward(
        logits, None, tokens, response_mask, temperature, vocab_size, False, inplace_backward
    )
    return outputs[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor]:
    """log π(a), H(π)."""
    outputs: tuple[Tensor, ...] = _forward(
        logits, None, tokens, response_mask, temperature, vocab_size, True, inplace_backward
    )
    return outputs[0], outputs[1]


def categorical_kl(
    logits: Tensor,
    ref_logits: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
) -> Tensor:
    """KL(π‖π_ref)."""
    ref = ref_logits.detach()
    outputs: tuple[Tensor, ...] = _forward(
        logits, ref, None, response_mask, temperature, vocab_size, False, False
    )
    return outputs[2]


def token_statistics(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
    response_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π(a), H(π), KL(π‖π_ref), log π_ref(a)."""
    ref = ref_logits.detach()
    logprobs, entropy, kl, ref_logprobs = _forward(
        logits, ref, tokens, response_mask, temperature, vocab_size, True, False
    )
    return logprobs, entropy, kl, ref_logprobs.detach()


@torch.library.custom_op("ppo_kernels::torch_token_statistics", mutates_args=())
def _forward(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    response_mask: Tensor | None,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is not asked for comes back with no elements."""
    outputs = _empty_outputs(logits, ref_logits, tokens, with_entropy)
    counted, valid, index = _positions(logits, tokens, response_mask, vocab_size)
    scratch = Scratch(outputs[0], temperature, vocab_size)
    wanted = [output if output.shape == index.shape else None for output in outputs]
    for x, x_ref, a, v, *out in row_pieces(scratch.rows, logits, ref_logits, index, valid, *wanted):
        # On a CPU padding is skipped; elsewhere looking at it would wait for the device.
        if v.device.type != "cpu" or v.any():
            statistics_of_piece(scratch, x, x_ref, a[:, None], *out)
    for output in wanted:
        if output is not None:
            output.masked_fill_(~valid, math.nan).masked_fill_(~counted, 0)
    return outputs


@_forward.register_fake
def _(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    response_mask: Tensor | None,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(logits, ref_logits, tokens, with_entropy)


@torch.library.custom_op("ppo_kernels::torch_token_statistics_backward", mutates_args=())
def _backward(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    response_mask: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    temperature: float,
    vocab_size: int,
) -> Tensor:
    gradient = torch.empty_like(logits)
    inputs = (logits, ref_logits, tokens, response_mask)
    grads = (grad_logprobs, grad_entropy, grad_kl)
    _write_gradient(gradient, inputs, grads, temperature, vocab_size)
    return gradient


@_backward.register_fake
def _(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor | None,
    response_mask: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    temperature: float,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(logits)


def _write_gradient(
    gradient: Tensor,
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    grads: tuple[Tensor | None, ...],
    temperature: float,
    vocab_size: int,
) -> None:
    """Write d/dlogits; `gradient` may be the logits: each piece is read before it is written."""
    logits, ref_logits, tokens, response_mask = inputs
    _, valid, index = _positions(logits, tokens, response_mask, vocab_size)
    scaled = [None if g is None else torch.where(valid, g, 0).div_(temperature) for g in grads]
    like = next(g for g in scaled if g is not None)
    scratch = Scratch(like, temperature, vocab_size)
    overwrites = gradient.data_ptr() == logits.data_ptr()
    gradient[..., vocab_size:] = 0
    for x, x_ref, a, v, g_lp, g_h, g_kl, out in row_pieces(
        scratch.rows, logits, ref_logits, index, valid, *scaled, gradient
    ):
        out = out[:, :vocab_size]
        on_cpu = v.device.type == "cpu"
        if on_cpu and not v.any():
            out.zero_()
            continue
        direct = out.dtype == like.dtype and out.is_contiguous() and not overwrites
        target = out if direct else None
        dz = gradient_of_piece(scratch, x, x_ref, a[:, None], g_lp, g_h, g_kl, target)
        if not (on_cpu and v.all()):
            dz.masked_fill_(~v[:, None], 0)
        if not direct:
            out.copy_(dz)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])
    ctx.temperature, ctx.vocab_size, _, ctx.inplace_backward = inputs[4:]


def _run_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved, scale = ctx.saved_tensors, (ctx.temperature, ctx.vocab_size)
    shape = saved[0].shape[:-1]
    wanted = tuple(g if g is not None and g.shape == shape else None for g in grads[:3])
    if all(g is None for g in wanted):
        gradient = None
    elif ctx.inplace_backward:
        if torch.is_grad_enabled():
            _refuse_second_derivative(ctx)
        # An alias with the same version counter: writing to it is seen by autograd, so that
        # anyone who has saved the logits, this node included, fails instead of using them.
        gradient = saved[0].detach()
        _write_gradient(gradient, saved, wanted, *scale)
    else:
        gradient = _backward(*saved, *wanted, *scale)
    return gradient, *[None] * 7


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "ppo_kernels' operators over logits can be differentiated once: their gradient has no "
        "gradient; use impl='reference' for second derivatives"
    )


torch.library.register_autograd(
    "ppo_kernels::torch_token_statistics", _run_backward, setup_context=_setup_context
)
torch.library.register_autograd(
    "ppo_kernels::torch_token_statistics_backward", _refuse_second_derivative
)


def _empty_outputs(
    logits: Tensor, ref_logits: Tensor | None, tokens: Tensor | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = any(t is not None and t.dtype == torch.float64 for t in (logits, ref_logits))
    dtype = torch.float64 if wide else torch.float32
    has_tokens, has_ref = tokens is not None, ref_logits is not None
    wanted = (has_tokens, with_entropy, has_ref, has_tokens and has_ref)
    a, b, c, d = (logits.new_empty(logits.shape[:-1] if w else (0,), dtype=dtype) for w in wanted)
    return a, b, c, d


def _positions(
    logits: Tensor, tokens: Tensor | None, response_mask: Tensor | None, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which positions count; which of them also have a token that is a column; that column."""
    if tokens is None:
        counted = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        tokens = counted.to(torch.int64).zero_()
    else:
        counted = tokens != _IGNORE_INDEX
    if response_mask is not None:
        counted = counted & response_mask
    valid = counted & (tokens >= 0) & (tokens < vocab_size)
    return counted.contiguous(), valid.contiguous(), torch.where(valid, tokens, 0).contiguous()
