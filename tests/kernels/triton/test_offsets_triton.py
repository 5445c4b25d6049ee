"""Rows and columns beyond 2³¹ elements: memory that nobody touches costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ppo_kernels as ops

FAR = 2**31 + 64
VALUES = torch.tensor([[0.5, -1, 2], [1, 3, -2]])
TOKENS = torch.tensor([2, 0])

OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "gae": lambda x, m: ops.gae(x, x, m, gamma=0.9, impl="triton"),
    "token_rewards": lambda x, m: ops.token_rewards(
        x[:, 0], x, x, m, kl_coef=0.1, estimator="k3", impl="triton"
    ),
    "ppo_advantages": lambda x, m: ops.ppo_advantages(
        x[:, 0], x, x, x, m, kl_coef=0.1, bootstrap_values=x[:, 1], impl="triton"
    ),
    "masked_moments": lambda x, m: ops.masked_moments(x, m, impl="triton"),
    "whiten": lambda x, m: ops.whiten(x, m, impl="triton"),
    "kl_penalty": lambda x, m: ops.kl_penalty(x, x, response_mask=m, impl="triton"),
    "ppo_loss": lambda x, m: ops.ppo_loss(x, x, x, x, x, x, m, impl="triton"),
    "token_statistics": lambda x, m: ops.token_statistics(x, x, TOKENS, impl="triton"),
}


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def far(values: Tensor, strides: tuple[int, int]) -> Tensor:
    torch.use_deterministic_algorithms(False)  # would fill the memory
    return torch.empty(FAR, dtype=values.dtype).as_strided((2, 3), strides).copy_(values)


@pytest.mark.parametrize("strides", [(2**31, 1), (1, 2**30)])
@pytest.mark.parametrize("name", OPS)
def test_offsets_beyond_int32(name: str, strides: tuple[int, int]) -> None:
    x, mask = VALUES.bfloat16(), torch.tensor([[True, False, True], [True, True, True]])
    want = OPS[name](x, mask)
    got = OPS[name](far(x, strides), far(mask, strides))
    for a, b in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(a, b)
    leaf = far(x, strides).requires_grad_()
    result = flat(OPS[name](leaf, mask))[0]
    if result.requires_grad:
        near = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(flat(OPS[name](near, mask))[0].sum(), near)
        (gradient,) = torch.autograd.grad(result.sum(), leaf)
        torch.testing.assert_close(gradient, want)
