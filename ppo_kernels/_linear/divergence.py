"""The exact KL divergence of two heads: two matmuls forward, four backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels._linear.head import Gradients, Head, Settings, Wanted, empty_gradients
from ppo_kernels._linear.logprobs import refuse_second_derivative
from ppo_kernels._linear.rows import row_kernels


@torch.library.custom_op("ppo_kernels::linear_categorical_kl", mutates_args=())
def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    ref_bias: Tensor | None,
    counted: Tensor,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    dtype: torch.dtype,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """KL(π‖π_ref) [n], and what the backward pass needs, [n, 5 or 6]."""
    settings = Settings(temperature, logit_scale, logit_softcap, chunk_bytes, dtype)
    kl, stats = _empty_outputs(hidden, dtype, impl)
    kl.zero_()
    stats.zero_()
    rows = row_kernels(impl)
    with torch.autocast(hidden.device.type, enabled=False):
        head, ref_head = Head(weight, bias, settings), Head(ref_weight, ref_bias, settings)
        chunks = head.chunks(counted, settings)
        pairs = zip(
            head.logits(hidden, chunks, dtype),
            ref_head.logits(ref_hidden, chunks, dtype),
            strict=True,
        )
        for (part, _, logits), (_, _, ref_logits) in pairs:
            kl[part], stats[part] = rows.forward_pair_rows(
                logits, ref_logits, counted[part], head.temperature
            )
    return kl, stats


@linear_kl.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_outputs(hidden, others[-2], others[-1])


@torch.library.custom_op("ppo_kernels::linear_categorical_kl_backward", mutates_args=())
def _backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    ref_bias: Tensor | None,
    counted: Tensor,
    stats: Tensor,
    g_kl: Tensor,
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
    rows = row_kernels(impl)
    with torch.autocast(hidden.device.type, enabled=False):
        head, ref_head = Head(weight, bias, settings), Head(ref_weight, ref_bias, settings)
        chunks = head.chunks(counted, settings)
        wanted = Wanted(hidden_wanted, weight_wanted, bias_wanted)
        totals = Gradients(hidden, weight, bias, chunks, wanted)
        pairs = zip(
            head.logits(hidden, chunks, dtype),
            ref_head.logits(ref_hidden, chunks, dtype),
            strict=True,
        )
        for (part, h, logits), (_, _, ref_logits) in pairs:
            tanh, g = head.remember(logits), g_kl[part] * head.slope
            rows.backward_pair_rows_(
                logits, ref_logits, counted[part], head.temperature, stats[part], g
            )
            head.pass_cap_(logits, tanh)
            totals.add(head, part, h, logits)
        return totals.results()


@_backward.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(hidden, weight, bias, Wanted(*others[-3:]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:7], output[1])
    ctx.settings = inputs[7:]


def _run_backward(ctx: Any, g_kl: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    given: list[Tensor | None] = [None] * 3
    wanted = ctx.needs_input_grad[:3]
    if g_kl is not None and any(wanted):
        totals = _backward(*ctx.saved_tensors, g_kl, *ctx.settings, *wanted)
        given = [total if want else None for total, want in zip(totals, wanted, strict=True)]
    return *given, *[None] * 10


torch.library.register_autograd(
    "ppo_kernels::linear_categorical_kl", _run_backward, setup_context=_setup_context
)
torch.library.register_autograd(
    "ppo_kernels::linear_categorical_kl_backward", refuse_second_derivative
)


def _empty_outputs(hidden: Tensor, dtype: torch.dtype, impl: str) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    n = hidden.shape[0]
    width = 6 if impl == "triton" else 5
    return hidden.new_empty(n, dtype=wide), hidden.new_empty((n, width), dtype=wide)
