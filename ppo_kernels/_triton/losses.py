"""Clipped policy and value losses: launcher, autograd, registration, entries.

The forward pass is one launch that leaves the gradients behind as well, since every weight and
advantage is known then; without grad mode they are neither computed nor allocated. The backward
pass multiplies them by grad_output into new memory, so that a second backward pass starts from
the same numbers. Weights given as a mask are 1/count, and the count is known only after the last
token: the stored gradient is then that of the sum, and backward divides by the count, a scalar on
the device. Counting first would read the mask twice in every forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels._triton import tiling as tiles
from ppo_kernels._triton._compile import CompileSpec
from ppo_kernels._triton.losses_kernels import clipped_losses_kernel

NUM_WARPS = 4

MAX_PROGRAMS = 384
"""One wave: at up to 152 registers a thread, 3 programs fit on each of the 132 cores of a H200."""

POLICY_STATS = slice(0, 6)
"""loss, clipfrac, approx_kl, ratio_mean, ratio_var, count"""

N_STATS = 9
"""The policy's six, the value loss and its clipfrac, and the factor of the stored gradients."""

N_PARTIALS = 9

NO_DUAL_CLIP = 1e18
"""Beyond any ratio (they end at exp(40) = 2.4e17), so it never binds; finite, as inf·0 is NaN."""


def _launch_clipped_losses(
    logprobs: Tensor | None,
    values: Tensor | None,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    old_values: Tensor | None,
    returns: Tensor | None,
    weights: Tensor,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float,
    cliprange_value: float,
    vf_coef: float,
    logprobs_grad: bool,
    values_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [], statistics [9], and the wanted gradients [0 to 2, B, T] up to statistics[-1]."""
    inputs = (logprobs, old_logprobs, advantages, values, old_values, returns, weights)
    tiling = tiles.tiling(*inputs)
    n_programs = max(1, min(tiling.n_tiles, MAX_PROGRAMS))
    device = weights.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    stats = torch.empty(N_STATS, dtype=torch.float32, device=device)
    partials = torch.empty((N_PARTIALS, n_programs), dtype=torch.float32, device=device)
    n_grads = logprobs_grad + values_grad
    grads = torch.empty((n_grads, *weights.shape), dtype=torch.float32, device=device)
    with tiles.on_device_of(weights):
        clipped_losses_kernel[(n_programs,)](
            *inputs[:-1],
            tiles.as_bytes(weights),
            grads[0] if logprobs_grad else None,
            grads[-1] if values_grad else None,
            partials,
            tiles.ticket(device),
            loss,
            stats,
            tiling.n_rows,
            tiling.n_cols,
            *(stride for x in inputs for stride in tiling.strides(x)),
            1.0 - cliprange,
            1.0 + cliprange_high,
            float(dual_clip),
            float(cliprange_value),
            float(vf_coef),
            MASK_WEIGHTS=weights.dtype == torch.bool,
            **tiling.shape,
            SLOTS=tiles.SLOTS_PER_WARP * NUM_WARPS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return loss, stats, grads


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, stats, grads = output
    ctx.mark_non_differentiable(stats, grads)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(stats, grads)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:2]]
    ctx.masked, ctx.stored = inputs[6].dtype == torch.bool, inputs[-2:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    tiles.refuse_second_derivative("the loss")
    results: list[Tensor | None] = [None] * 14
    if grad_loss is None:
        return tuple(results)
    stats, grads = ctx.saved_tensors
    scaled = iter((grads * (grad_loss * stats[-1] if ctx.masked else grad_loss)).unbind())
    for i, stored in enumerate(ctx.stored):
        if stored:
            results[i] = next(scaled).to(ctx.dtypes[i])
    return tuple(results)


class _ClippedLosses(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _launch_clipped_losses(*inputs)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


_NAME = "ppo_kernels::clipped_losses"
torch.library.custom_op(_NAME, _launch_clipped_losses, mutates_args=())
torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)


@torch.library.register_fake(_NAME)
def _fake_clipped_losses(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, logprobs_grad, values_grad = inputs[6], inputs[-2], inputs[-1]
    options = {"dtype": torch.float32, "device": weights.device}
    grads = torch.empty((logprobs_grad + values_grad, *weights.shape), **options)
    return torch.empty((), **options), torch.empty(N_STATS, **options), grads


def _clipped_losses(
    logprobs: Tensor | None,
    values: Tensor | None,
    constants: tuple[Tensor | None, ...],
    settings: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    wanted = [
        x is not None and x.requires_grad and torch.is_grad_enabled() for x in (logprobs, values)
    ]
    compiling = torch.compiler.is_compiling()
    call = torch.ops.ppo_kernels.clipped_losses if compiling else _ClippedLosses.apply
    detached = [None if x is None else x.detach() for x in constants]
    loss, stats, _ = call(logprobs, values, *detached, *settings, *wanted)
    return loss, stats


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, ...]:
    """(loss, clipfrac, approx_kl, ratio_mean, ratio_var, count)"""
    settings = (
        cliprange,
        cliprange_high,
        NO_DUAL_CLIP if dual_clip is None else dual_clip,
        0.0,
        0.0,
    )
    constants = (old_logprobs, advantages, None, None, weights)
    loss, stats = _clipped_losses(logprobs, None, constants, settings)
    return (loss, *stats.unbind()[1:6])


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    cliprange_value: float | None,
) -> tuple[Tensor, ...]:
    """(loss, clipfrac, count)"""
    old_values = None if cliprange_value is None else old_values
    constants = (None, None, old_values, returns, weights)
    settings = (0.0, 0.0, 0.0, cliprange_value or 0.0, 1.0)
    loss, stats = _clipped_losses(None, values, constants, settings)
    return loss, stats[7], stats[5]


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
    cliprange_value: float | None,
    vf_coef: float,
) -> tuple[Tensor, ...]:
    """(loss, policy's six, value's three)"""
    old_values = None if cliprange_value is None else old_values
    constants = (old_logprobs, advantages, old_values, returns, weights)
    dual_clip = NO_DUAL_CLIP if dual_clip is None else dual_clip
    settings = (cliprange, cliprange_high, dual_clip, cliprange_value or 0.0, vf_coef)
    loss, stats = _clipped_losses(logprobs, values, constants, settings)
    numbers = stats.unbind()
    return (loss, *numbers[POLICY_STATS], numbers[6], numbers[7], numbers[5])


def compile_specs() -> list[CompileSpec]:
    policy = dict.fromkeys(("logprobs_ptr", "old_ptr", "adv_ptr", "logprobs_grad_ptr"))
    value = dict.fromkeys(("values_ptr", "oldv_ptr", "returns_ptr", "values_grad_ptr"))
    no_grad = dict.fromkeys(("logprobs_grad_ptr", "values_grad_ptr"))
    halves = {"policy_loss": value, "value_loss": policy, "ppo_loss no grad": no_grad}
    flat = tiles.spec_tiles()["flat"]
    cases = [("ppo_loss " + name, {}, tile) for name, tile in tiles.spec_tiles().items()]
    cases += [(name, absent, flat) for name, absent in halves.items()]
    specs = []
    for label, absent, tile in cases:
        for weights in ("*fp32", "*u8"):
            pointers = {"weights_ptr": weights, "ticket_ptr": "*i32", **absent}
            constants = {
                **tile,
                "MASK_WEIGHTS": weights == "*u8",
                "SLOTS": tiles.SLOTS_PER_WARP * NUM_WARPS,
            }
            specs.append(
                tiles.compile_spec(
                    clipped_losses_kernel, f"{label} {weights}", constants, pointers,
                    streaming_loads=tile == flat,
                )
            )  # fmt: skip
    return specs
