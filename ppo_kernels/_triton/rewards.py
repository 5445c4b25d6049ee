"""KL penalty per token and token rewards: launchers, autograd, registration, entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels._triton import tiling as tiles
from ppo_kernels._triton._compile import CompileSpec
from ppo_kernels._triton.rewards_kernels import kl_penalty_kernel, token_rewards_kernel


def _launch_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor | None,
    grad_output: Tensor | None,
    estimator: str,
) -> Tensor:
    out = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    tiling = tiles.tiling(logprobs, ref_logprobs, response_mask, grad_output)
    if out.numel() == 0:
        return out
    with tiles.on_device_of(logprobs):
        kl_penalty_kernel[(tiling.n_tiles,)](
            logprobs,
            ref_logprobs,
            tiles.as_bytes(response_mask),
            grad_output,
            out,
            tiling.n_rows,
            tiling.n_cols,
            *tiling.strides(logprobs),
            *tiling.strides(ref_logprobs),
            *tiling.strides(response_mask),
            *tiling.strides(grad_output),
            ESTIMATOR=estimator,
            **tiling.shape,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


def _launch_kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor | None, estimator: str
) -> Tensor:
    return _launch_kl(logprobs, ref_logprobs, response_mask, None, estimator)


def _launch_kl_penalty_backward(
    grad_output: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor | None,
    estimator: str,
) -> Tensor:
    return _launch_kl(logprobs, ref_logprobs, response_mask, grad_output, estimator)


def _launch_token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str,
) -> Tensor:
    out = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    launch = tiles.row_tiling(logprobs, ref_logprobs, response_mask)
    with tiles.on_device_of(logprobs):
        token_rewards_kernel[(launch.n_programs,)](
            scores,
            logprobs,
            ref_logprobs,
            tiles.as_bytes(response_mask),
            out,
            *logprobs.shape,
            scores.stride(0),
            *logprobs.stride(),
            *ref_logprobs.stride(),
            *response_mask.stride(),
            float(kl_coef),
            ESTIMATOR=estimator,
            **launch.shape,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logprobs, ref_logprobs, response_mask, ctx.estimator = inputs
    ctx.save_for_backward(logprobs, ref_logprobs, response_mask)
    ctx.in_graph = False


def _setup_graph_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The registered op is also traced without the compiler's knowledge, as by opcheck."""
    _setup_context(ctx, inputs, output)
    ctx.in_graph = True


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    tiles.refuse_second_derivative("kl_penalty")
    logprobs, ref_logprobs, response_mask = ctx.saved_tensors
    run = torch.ops.ppo_kernels.kl_penalty_backward if ctx.in_graph else _launch_kl_penalty_backward
    grad = run(grad_output, logprobs, ref_logprobs, response_mask, ctx.estimator)
    wanted, ref_wanted = ctx.needs_input_grad[:2]
    ref_grad = (-grad).to(ref_logprobs.dtype) if ref_wanted else None
    return grad.to(logprobs.dtype) if wanted else None, ref_grad, None, None


class _KLPenalty(torch.autograd.Function):
    @staticmethod
    def forward(
        logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor | None, estimator: str
    ) -> Tensor:
        return _launch_kl_penalty(logprobs, ref_logprobs, response_mask, estimator)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


def _empty_like_logprobs(logprobs: Tensor) -> Tensor:
    return torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)


torch.library.custom_op("ppo_kernels::kl_penalty", _launch_kl_penalty, mutates_args=())
torch.library.register_autograd(
    "ppo_kernels::kl_penalty", _backward, setup_context=_setup_graph_context
)
torch.library.custom_op(
    "ppo_kernels::kl_penalty_backward", _launch_kl_penalty_backward, mutates_args=()
)
torch.library.custom_op("ppo_kernels::token_rewards", _launch_token_rewards, mutates_args=())


@torch.library.register_fake("ppo_kernels::kl_penalty")
def _fake_kl_penalty(logprobs: Tensor, *_: object) -> Tensor:
    return _empty_like_logprobs(logprobs)


@torch.library.register_fake("ppo_kernels::kl_penalty_backward")
def _fake_kl_penalty_backward(grad_output: Tensor, *_: object) -> Tensor:
    return _empty_like_logprobs(grad_output)


@torch.library.register_fake("ppo_kernels::token_rewards")
def _fake_token_rewards(scores: Tensor, logprobs: Tensor, *_: object) -> Tensor:
    return _empty_like_logprobs(logprobs)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str, response_mask: Tensor | None
) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.ppo_kernels.kl_penalty(logprobs, ref_logprobs, response_mask, estimator)
    return _KLPenalty.apply(logprobs, ref_logprobs, response_mask, estimator)


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str,
) -> Tensor:
    return tiles.run(
        "token_rewards", _launch_token_rewards, scores, logprobs, ref_logprobs, response_mask,
        kl_coef, estimator,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    specs = []
    mask = {"mask_ptr": "*u8"}
    for estimator in ("k1", "k3"):  # the lightest and the heaviest
        for name, tile in tiles.spec_tiles().items():
            constants, wide = {**tile, "ESTIMATOR": estimator}, name == "flat"
            forward = {**mask, "grad_ptr": None}
            specs += [
                tiles.compile_spec(
                    kl_penalty_kernel, f"kl_penalty {direction} {estimator} {name}", constants,
                    pointers, streaming_loads=wide,
                )
                for direction, pointers in (("forward", forward), ("backward", mask))
            ]  # fmt: skip
    for name, (shape, num_warps) in tiles.spec_row_tiles().items():
        constants, wide = {**shape, "ESTIMATOR": "k3"}, shape["VEC"] > 1
        label = f"token_rewards {name}"
        specs.append(
            tiles.compile_spec(token_rewards_kernel, label, constants, mask, num_warps, wide)
        )
    return specs
