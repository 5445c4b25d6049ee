"""Learning rate by optimiser step: warm-up, then constant, linear or cosine down to a floor."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Kind = Literal["constant", "linear", "cosine"]


def make_scheduler(
    optimizer: Optimizer, kind: Kind, total_steps: int, *, warmup_steps: int = 0, floor: float = 0.0
) -> LambdaLR:
    """Multiply the learning rate of each optimiser step k = 0, 1, ... by a factor.

    With p = min(1, (k − W)/(K − W)) after W warm-up steps of K steps in all:

    f(k) = (k + 1)/(W + 1) for k < W;  then 1 (constant),  1 − (1 − f_min)·p (linear),
    f_min + (1 − f_min)·½(1 + cos πp) (cosine)

    No step runs at a rate of 0 by itself: the first is part of the warm-up already, and the decay
    reaches the floor after the last. Past K the factor stays at the floor. (transformers'
    schedules start at 0, turn up again past K, and their "constant" ignores the warm-up.)

    Call `step()` once after each `optimizer.step()` that ran, never for a micro-batch, and leave
    the scheduler out of `accelerator.prepare`, which would step it once per rank. To resume, build
    optimiser and scheduler as at the start, then load both states: the optimiser's holds the rate
    of the next step, the scheduler's the count, and nothing is stepped. Kind, lengths and floor
    come from the settings, never from the state.

    Args:
        optimizer: its present learning rates are those of factor 1.
        kind: "constant", "linear" or "cosine".
        total_steps: K ≥ 1, optimiser steps planned for this optimiser.
        warmup_steps: W in [0, K].
        floor: f_min in [0, 1]; no effect on "constant".

    Raises:
        ValueError: an argument is out of range.

    Source: linear: https://github.com/openai/lm-human-preferences; cosine: Loshchilov & Hutter
    2017, "SGDR", eq. 5 without restarts, https://arxiv.org/abs/1608.03983.
    """
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"kind must be 'constant', 'linear' or 'cosine', got {kind!r}")
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            f"warmup_steps must be in [0, {total_steps}] (total_steps), got {warmup_steps}"
        )
    if not 0 <= floor <= 1:
        raise ValueError(f"floor must be in [0, 1], got {floor}")

    # a plain function: LambdaLR would save an object's fields, and put old settings back
    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if kind == "constant":
            return 1.0
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        left = 1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return floor + (1 - floor) * left

    return LambdaLR(optimizer, factor)
