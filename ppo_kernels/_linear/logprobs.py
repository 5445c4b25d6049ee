"""Log-probabilities and entropy from hidden states: one matmul forward, three backward.

Kept for the backward pass are the inputs, three sums per token and the logits of the first few
chunks; it computes the others again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels._linear.head import (
    Gradients,
    Head,
    Settings,
    Wanted,
    empty_gradients,
    padded_columns,
)
from ppo_kernels._linear.rows import row_kernels
from ppo_kernels.reference import IGNORE_INDEX


@torch.library.custom_op("ppo_kernels::linear_token_logprobs", mutates_args=())
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    dtype: torch.dtype,
    with_entropy: bool,
    impl: str,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π(a) [n]; H [n], no elements if not wanted; for the backward pass [n, 3], and up to
    `keep` rows of x or tanh."""
    settings = Settings(temperature, logit_scale, logit_softcap, chunk_bytes, dtype)
    logprobs, entropy, stats, kept = _empty_outputs(hidden, weight, dtype, with_entropy, keep)
    for x in (logprobs, entropy, stats):
        x.zero_()
    rows = row_kernels(impl)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(weight, bias, settings)
        chunks = head.chunks(tokens != IGNORE_INDEX, settings)
        for part, _, logits in head.logits(hidden, chunks, dtype, kept):
            lp, h, sums = rows.forward_rows(logits, tokens[part], head.temperature, with_entropy)
            logprobs[part], stats[part] = lp, sums
            if h is not None:
                entropy[part] = h
    return logprobs, entropy, stats, kept


@linear_logprobs.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    dtype: torch.dtype,
    with_entropy: bool,
    impl: str,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(hidden, weight, dtype, with_entropy, keep)


@torch.library.custom_op("ppo_kernels::linear_token_logprobs_backward", mutates_args=())
def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    stats: Tensor,
    kept: Tensor,
    g_logprobs: Tensor | None,
    g_entropy: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    dtype: torch.dtype,
    impl: str,
    hidden_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(temperature, logit_scale, logit_softcap, chunk_bytes, dtype)
    wanted = Wanted(hidden_wanted, weight_wanted, bias_wanted)
    return gradients_by_chunk(
        (hidden, weight, bias),
        tokens,
        stats,
        kept,
        (g_logprobs, g_entropy),
        settings,
        impl,
        wanted,
    )


@_backward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(hidden, weight, bias, Wanted(*others[-3:]))


def gradients_by_chunk(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    tokens: Tensor,
    stats: Tensor,
    kept: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    settings: Settings,
    impl: str,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn each chunk of logits, kept or computed again, into gradients."""
    hidden, weight, bias = inputs
    rows = row_kernels(impl)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(weight, bias, settings)
        chunks = head.chunks(tokens != IGNORE_INDEX, settings)
        totals = Gradients(hidden, weight, bias, chunks, wanted)
        for part, h, logits in head.logits(hidden, chunks, settings.dtype, kept, again=True):
            tanh = head.remember(logits)
            g = [None if g is None else g[part] * head.slope for g in grads]
            rows.backward_rows_(logits, tokens[part], head.temperature, stats[part], *g)
            head.pass_cap_(logits, tanh)
            totals.add(head, part, h, logits)
        return totals.results()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs[:4], *output[2:])
    *ctx.settings, ctx.with_entropy, ctx.impl, _ = inputs[4:]


def _run_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    g_logprobs, g_entropy = grads[0], grads[1] if ctx.with_entropy else None
    wanted = ctx.needs_input_grad[:3]
    none = [None] * 9
    if g_logprobs is None and g_entropy is None:
        return None, None, None, *none
    totals = _backward(*ctx.saved_tensors, g_logprobs, g_entropy, *ctx.settings, ctx.impl, *wanted)
    given = [total if want else None for total, want in zip(totals, wanted, strict=True)]
    return *given, *none


def refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "ppo_kernels' operators over hidden states can be differentiated once: their gradient has "
        "no gradient; use impl='reference' for second derivatives"
    )


torch.library.register_autograd(
    "ppo_kernels::linear_token_logprobs", _run_backward, setup_context=_setup_context
)
torch.library.register_autograd(
    "ppo_kernels::linear_token_logprobs_backward", refuse_second_derivative
)


def _empty_outputs(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, with_entropy: bool, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    n = hidden.shape[0]
    shapes = ((n,), (n,) if with_entropy else (0,), (n, 3))
    a, b, c = (hidden.new_empty(shape, dtype=wide) for shape in shapes)
    return a, b, c, weight.new_empty((keep, padded_columns(weight)), dtype=dtype)
