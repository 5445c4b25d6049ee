"""A reward model from pairs: the Bradley–Terry model on top of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ppo.supervised import Schedule, StepHook, bucketed_batches, fit, right_pad


@dataclass(frozen=True)
class Pair:
    """Token ids of two whole texts, prompt and EOS included; `chosen` is the better one."""

    chosen: Sequence[int]
    rejected: Sequence[int]


def train_reward_model(
    model: Any,
    pairs: Sequence[Pair],
    *,
    epochs: int,
    batch_size: int,
    schedule: Schedule,
    seed: int,
    center_coef: float = 0.0,
    on_step: StepHook | None = None,
) -> None:
    """Train a reward model on preferences, in place.

    Minimises the mean over pairs of −log σ(r_w − r_l) + c·(r_w + r_l)². Pairs leave the level of
    the scores open; the second term holds it near 0.

    Args:
        model: a sequence classifier of transformers with one label and a decoder as its trunk.
        pairs: what to learn from; batches gather pairs of similar length.
        epochs: passes over the pairs.
        batch_size: pairs per step.
        schedule: the optimiser's settings.
        seed: fixes the order of the pairs. Dropout, in a model that has it, reads torch's global
            generator.
        center_coef: c.
        on_step: called with the number of steps done and that step's loss.

    Source: Stiennon et al. 2020, section 3.4, https://arxiv.org/abs/2009.01325; the second term
    from Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    """

    def batch_loss(indices: Sequence[int]) -> Tensor:
        batch = [pairs[i] for i in indices]
        scores = score_sequences(model, [p.chosen for p in batch] + [p.rejected for p in batch])
        chosen, rejected = scores.chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        return loss + center_coef * (chosen + rejected).square().mean()

    lengths = [max(len(p.chosen), len(p.rejected)) for p in pairs]
    steps = epochs * max(1, len(pairs) // batch_size)
    batches = bucketed_batches(lengths, batch_size, steps, seed)
    fit(model, batches, batch_loss, schedule, on_step)


@torch.no_grad()
def evaluate_reward_model(model: Any, pairs: Sequence[Pair], *, batch_size: int) -> float:
    """Return the share of the pairs whose chosen text has the higher score."""
    chosen = score_all(model, [p.chosen for p in pairs], batch_size=batch_size)
    rejected = score_all(model, [p.rejected for p in pairs], batch_size=batch_size)
    return float((chosen > rejected).float().mean())


@torch.no_grad()
def score_all(model: Any, sequences: Sequence[Sequence[int]], *, batch_size: int) -> Tensor:
    """Score any number of sequences in batches: returns [N] fp32."""
    parts = [
        score_sequences(model, sequences[start : start + batch_size])
        for start in range(0, len(sequences), batch_size)
    ]
    return torch.cat(parts)


def score_sequences(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Score each sequence at its last token: returns [B] fp32.

    The index comes from the lengths and not from the pad id, so that an EOS that doubles as padding
    cannot shift it.
    """
    device = next(model.parameters()).device
    ids, mask = right_pad(sequences, fill=0)
    hidden = model.base_model(
        input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False
    ).last_hidden_state
    last = (mask.sum(1) - 1).to(device)
    scores: Tensor = model.score(hidden[torch.arange(len(last), device=device), last])
    return scores.float().squeeze(-1)


@torch.no_grad()
def rescale_scores(model: Any, scores: Tensor) -> float:
    """Scale the head so that `scores`, which it gave, would have SD 1; returns their SD so far."""
    deviation = float(scores.std())
    model.score.weight /= deviation
    return deviation


if __name__ == "__main__":
    import sys

    from ppo.reward_model_command import main  # it imports this file

    sys.exit(main())
