"""GAE and token rewards + GAE + moments: launchers, registration, entries.

One launch for the whole batch, rows on the first grid axis. One program walks a row in blocks of
up to 2048 tokens. Splitting long rows over programs does not pay: 4 rows of 32k tokens are 16
blocks in sequence at 2 to 3 µs each (a load from memory and two scans), about 40 µs. A split takes
three launches (scan, carries, fix-up) of about 5 µs on the device and 20 to 30 µs in Python each,
reads its input twice, and gains nothing once there are as many rows as cores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels._triton import tiling as tiles
from ppo_kernels._triton._compile import CompileSpec
from ppo_kernels._triton.gae_kernels import gae_kernel, ppo_advantages_kernel


def _empty_like_float32(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _launch_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor | None,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    advantages, returns = _empty_like_float32(values), _empty_like_float32(values)
    launch = tiles.row_tiling(rewards, values, response_mask)
    with tiles.on_device_of(values):
        gae_kernel[(launch.n_programs,)](
            rewards,
            values,
            tiles.as_bytes(response_mask),
            bootstrap_values,
            advantages,
            returns,
            *values.shape,
            _stride(bootstrap_values),
            *rewards.stride(),
            *values.stride(),
            *tiles.strides(response_mask),
            float(gamma),
            float(gae_lambda),
            **launch.shape,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
    return advantages, returns


def _launch_ppo_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    advantages, returns = _empty_like_float32(values), _empty_like_float32(values)
    moments = values.new_empty(3, dtype=torch.float32)
    launch = tiles.row_tiling(logprobs, ref_logprobs, values, response_mask)
    with tiles.on_device_of(values):
        ppo_advantages_kernel[(launch.n_programs,)](
            scores,
            logprobs,
            ref_logprobs,
            values,
            tiles.as_bytes(response_mask),
            bootstrap_values,
            advantages,
            returns,
            values.new_empty((4, launch.n_programs), dtype=torch.float32),
            tiles.ticket(values.device),
            moments,
            *values.shape,
            scores.stride(0),
            _stride(bootstrap_values),
            *logprobs.stride(),
            *ref_logprobs.stride(),
            *values.stride(),
            *response_mask.stride(),
            float(kl_coef),
            float(gamma),
            float(gae_lambda),
            ESTIMATOR=estimator,
            **launch.shape,
            SLOTS=tiles.SLOTS_PER_WARP * launch.num_warps,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
    return advantages, returns, moments


torch.library.custom_op("ppo_kernels::gae", _launch_gae, mutates_args=())
torch.library.custom_op("ppo_kernels::ppo_advantages", _launch_ppo_advantages, mutates_args=())


@torch.library.register_fake("ppo_kernels::gae")
def _fake_gae(rewards: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_like_float32(values), _empty_like_float32(values)


@torch.library.register_fake("ppo_kernels::ppo_advantages")
def _fake_ppo_advantages(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, values: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    moments = values.new_empty(3, dtype=torch.float32)
    return _empty_like_float32(values), _empty_like_float32(values), moments


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor | None,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return tiles.run(
        "gae", _launch_gae, rewards, values, response_mask, gamma, gae_lambda, bootstrap_values
    )


def ppo_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    estimator: str,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return tiles.run(
        "ppo_advantages", _launch_ppo_advantages, scores, logprobs, ref_logprobs, values,
        response_mask, kl_coef, estimator, gamma, gae_lambda, bootstrap_values,
    )  # fmt: skip


def compile_specs() -> list[CompileSpec]:
    specs = []
    mask = {"mask_ptr": "*u8", "ticket_ptr": "*i32"}
    for name, (shape, num_warps) in tiles.spec_row_tiles().items():
        wide = shape["VEC"] > 1
        fused = {**shape, "ESTIMATOR": "k3", "SLOTS": tiles.SLOTS_PER_WARP * num_warps}
        specs += [
            tiles.compile_spec(gae_kernel, f"gae {name}", shape, mask, num_warps, wide),
            tiles.compile_spec(
                ppo_advantages_kernel, f"ppo_advantages {name}", fused, mask, num_warps, wide
            ),
        ]
    no_mask = {"mask_ptr": None, "bootstrap_ptr": None}
    shape, num_warps = tiles.spec_row_tiles()["1x1024"]
    specs.append(tiles.compile_spec(gae_kernel, "gae no mask", shape, no_mask, num_warps))
    return specs
