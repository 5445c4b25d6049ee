"""The supervised loop that the warm-up of the actor and the reward model share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

StepHook = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Schedule:
    """AdamW with linear warm-up, a plateau, and linear decay over the last part of the steps."""

    lr: float
    warmup_steps: int = 20
    decay_fraction: float = 0.4
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0

    def factor(self, step: int, steps: int) -> float:
        """Scale of the learning rate at `step`, counted from 0: never 0 within the steps."""
        decay_steps = max(1.0, self.decay_fraction * steps)
        return min(1.0, (step + 1) / max(1, self.warmup_steps), (steps - step) / decay_steps)


def fit(
    model: nn.Module,
    batches: Sequence[Sequence[int]],
    batch_loss: Callable[[Sequence[int]], Tensor],
    schedule: Schedule,
    on_step: StepHook | None = None,
) -> None:
    """Take one optimiser step per batch of indices; leaves the model in evaluation mode."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, schedule.lr, schedule.betas, weight_decay=schedule.weight_decay, fused=True
    )
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * schedule.factor(step, len(batches))
        loss = batch_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step is not None:
            on_step(step + 1, loss.detach())
    model.eval()


def bucketed_batches(
    lengths: Sequence[int], batch_size: int, steps: int, seed: int, pool: int = 32
) -> list[list[int]]:
    """Draw `steps` batches of indices of similar length, so that little is spent on padding.

    Each pass over the data shuffles it, sorts every stretch of `pool` batches by length and
    shuffles the batches within the stretch. An incomplete last batch of a pass is left out, except
    where there is no other.

    Raises:
        ValueError: there is nothing to draw from.
    """
    if not lengths:
        raise ValueError("the training data must not be empty")
    rng = random.Random(seed)
    batches: list[list[int]] = []
    while len(batches) < steps:
        batches.extend(_one_pass(lengths, min(batch_size, len(lengths)), rng, pool))
    return batches[:steps]


def _one_pass(
    lengths: Sequence[int], batch_size: int, rng: random.Random, pool: int
) -> Iterator[list[int]]:
    order = list(range(len(lengths)))
    rng.shuffle(order)
    for start in range(0, len(order), pool * batch_size):
        stretch = sorted(order[start : start + pool * batch_size], key=lambda i: lengths[i])
        starts = list(range(0, len(stretch) - batch_size + 1, batch_size))
        rng.shuffle(starts)
        for first in starts:
            yield stretch[first : first + batch_size]


def right_pad(rows: Sequence[Sequence[int]], fill: int) -> tuple[Tensor, Tensor]:
    """Pad token rows on the right: returns ([B,L] int64, [B,L] bool, True = a real token)."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])
    return ids, torch.arange(width) < lengths[:, None]
