"""Supervised fine-tuning of a causal language model on prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ppo.supervised import Schedule, StepHook, bucketed_batches, fit, right_pad

IGNORED = -100


@dataclass(frozen=True)
class Example:
    """Token ids of one prompt and its response; the response ends with EOS."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __post_init__(self) -> None:
        if not self.response:
            raise ValueError("response must hold at least one token, its EOS")

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def train_sft(
    model: Any,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    schedule: Schedule,
    seed: int,
    train_on_prompt: bool = False,
    on_step: StepHook | None = None,
) -> None:
    """Train a model on responses, in place.

    Minimises −Σ_t log π(x_t | x_<t) / N over the N response tokens of a batch. Prompt tokens count
    only with `train_on_prompt`, and then all but the first; padding never does.

    Args:
        model: a causal language model of transformers.
        examples: what to learn from; batches gather examples of similar length.
        steps: optimiser steps.
        batch_size: sequences per step.
        schedule: the optimiser's settings.
        seed: fixes the order of the examples. Dropout, in a model that has it, reads torch's
            global generator.
        train_on_prompt: whether the prompts are learnt as well.
        on_step: called with the number of steps done and that step's loss.
    """

    def batch_loss(indices: Sequence[int]) -> Tensor:
        batch = [examples[i] for i in indices]
        total, count = _negative_log_likelihood(model, batch, train_on_prompt)
        return total / count

    batches = bucketed_batches([len(e) for e in examples], batch_size, steps, seed)
    fit(model, batches, batch_loss, schedule, on_step)


@torch.no_grad()
def evaluate_sft(model: Any, examples: Sequence[Example], *, batch_size: int) -> float:
    """Return the mean loss per response token, EOS included, in nats."""
    by_length = sorted(examples, key=len)
    total, count = 0.0, 0
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        batch_total, batch_count = _negative_log_likelihood(model, batch, train_on_prompt=False)
        total, count = total + batch_total.item(), count + batch_count
    return total / count


def _negative_log_likelihood(
    model: Any, batch: Sequence[Example], train_on_prompt: bool
) -> tuple[Tensor, int]:
    """Sum over the tokens that count, and their number."""
    device = next(model.parameters()).device
    ids, mask = right_pad([[*e.prompt, *e.response] for e in batch], fill=0)
    starts = torch.tensor([1 if train_on_prompt else max(1, len(e.prompt)) for e in batch])
    first = int(starts.min())  # no label before it in any row: its logits are never computed
    columns = torch.arange(first, ids.shape[1])
    counts = mask[:, first:] & (columns >= starts[:, None])
    labels = ids[:, first:].where(counts, IGNORED).to(device)
    logits = model(
        input_ids=ids.to(device),
        attention_mask=mask.long().to(device),
        logits_to_keep=(columns - 1).to(device),
        use_cache=False,
    ).logits
    total = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, int(counts.sum())


if __name__ == "__main__":
    import sys

    from ppo.sft_command import main  # it imports this file

    sys.exit(main())
