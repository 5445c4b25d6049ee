"""Bradley–Terry training: where scores are read, and what the loss does to them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from ppo.reward_model import (
    Pair,
    evaluate_reward_model,
    rescale_scores,
    score_all,
    score_sequences,
    train_reward_model,
)
from ppo.supervised import Schedule

PAIRS = [Pair([1, word, 10, 2], [1, word, 11, 12, 2]) for word in range(20, 36)]


@pytest.fixture
def model() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=2,  # the same as EOS: the usual reading of pad ids would stop one early
        eos_token_id=2,
    )
    config.num_labels = 1
    model: LlamaForSequenceClassification = LlamaForSequenceClassification(config).eval()
    return model


@torch.no_grad()
def test_scores_are_read_at_the_last_token(model: LlamaForSequenceClassification) -> None:
    rows = [[1, 5, 6, 2], [1, 2], [1, 7, 8, 9, 10, 2]]
    alone = [
        model.score(model.model(torch.tensor([row])).last_hidden_state[0, -1]).item()
        for row in rows
    ]
    assert score_sequences(model, rows).tolist() == pytest.approx(alone, abs=1e-6)
    assert score_all(model, rows, batch_size=2).tolist() == pytest.approx(alone, abs=1e-6)


def train(
    model: LlamaForSequenceClassification,
    epochs: int = 10,
    batch_size: int = 8,
    center_coef: float = 0.0,
) -> list[float]:
    losses: list[float] = []
    train_reward_model(
        model,
        PAIRS,
        epochs=epochs,
        batch_size=batch_size,
        schedule=Schedule(lr=3e-3, warmup_steps=1),
        seed=0,
        on_step=lambda step, loss: losses.append(loss.item()),
        center_coef=center_coef,
    )
    return losses


def test_training_orders_the_pairs(model: LlamaForSequenceClassification) -> None:
    swapped = [Pair(pair.rejected, pair.chosen) for pair in PAIRS]
    losses = train(model)
    assert len(losses) == 20
    assert losses[0] == pytest.approx(0.69, abs=0.1)
    assert evaluate_reward_model(model, PAIRS, batch_size=4) == 1.0
    assert evaluate_reward_model(model, swapped, batch_size=4) == 0.0


def test_the_loss_of_a_batch(model: LlamaForSequenceClassification) -> None:
    """All pairs in one batch, so the first loss is that of the untrained model."""
    chosen = score_all(model, [pair.chosen for pair in PAIRS], batch_size=8)
    rejected = score_all(model, [pair.rejected for pair in PAIRS], batch_size=8)
    ordered = (1 + (rejected - chosen).exp()).log().mean().item()
    level = (chosen + rejected).square().mean().item()
    losses = train(model, epochs=1, batch_size=16, center_coef=3.0)
    assert losses == [pytest.approx(ordered + 3.0 * level, abs=1e-5)]


def test_rescaling_gives_unit_deviation(model: LlamaForSequenceClassification) -> None:
    rows = [list(pair.rejected) for pair in PAIRS]
    scores = score_all(model, rows, batch_size=8)
    assert rescale_scores(model, scores) == pytest.approx(scores.std().item())
    assert score_all(model, rows, batch_size=8).std().item() == pytest.approx(1.0, abs=1e-4)
