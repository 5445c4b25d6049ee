"""Supervised fine-tuning: which tokens count, and that it learns them."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ppo.sft import Example, evaluate_sft, train_sft
from ppo.supervised import Schedule

EXAMPLES = [Example([1, 9, 10], [11, 12, 2]), Example([1, 20], [2]), Example([], [7, 8, 9, 2])]


def response_loss(model: PreTrainedModel, example: Example) -> tuple[float, int]:
    """Token by token, one sequence at a time."""
    tokens = [*example.prompt, *example.response]
    total, count = 0.0, 0
    for t in range(max(1, len(example.prompt)), len(tokens)):
        logits = model(torch.tensor([tokens[:t]])).logits[0, -1]
        total -= logits.log_softmax(-1)[tokens[t]].item()
        count += 1
    return total, count


@torch.no_grad()
def test_the_loss_is_the_mean_over_response_tokens(llama: PreTrainedModel) -> None:
    parts = [response_loss(llama, example) for example in EXAMPLES]
    expected = sum(total for total, _ in parts) / sum(count for _, count in parts)
    for batch_size in (1, 2, 8):
        loss = evaluate_sft(llama, EXAMPLES, batch_size=batch_size)
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_only_the_tokens_that_count_are_learnt(
    llama: PreTrainedModel, train_on_prompt: bool
) -> None:
    train_sft(
        llama,
        [Example([1, 30, 31, 32], [40, 2])],
        steps=60,
        batch_size=4,
        schedule=Schedule(lr=1e-2),
        seed=0,
        train_on_prompt=train_on_prompt,
    )
    with torch.no_grad():
        logprobs = llama(torch.tensor([[1, 30, 31, 32, 40]])).logits.log_softmax(-1)[0]
    assert logprobs[3, 40] > -0.1
    assert logprobs[4, 2] > -0.1
    assert (logprobs[0, 30] > -0.1) == train_on_prompt


def test_training_reports_every_step(llama: PreTrainedModel) -> None:
    losses: list[float] = []
    train_sft(
        llama,
        EXAMPLES,
        steps=3,
        batch_size=2,
        schedule=Schedule(lr=1e-3),
        seed=0,
        on_step=lambda step, loss: losses.append(loss.item()),
    )
    assert len(losses) == 3


def test_a_response_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^response must hold at least one token, its EOS$"):
        Example([1, 2], [])
