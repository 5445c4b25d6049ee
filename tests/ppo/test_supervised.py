"""The supervised loop: its schedule, its batches, and what they leave out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from ppo.supervised import Schedule, bucketed_batches, fit, right_pad


def test_the_learning_rate_climbs_stays_and_falls() -> None:
    schedule = Schedule(lr=1.0, warmup_steps=20, decay_fraction=0.4)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 20)
    assert factors[9] == pytest.approx(0.5)
    assert factors[19:61] == [1.0] * 42
    assert factors[80] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(1 / 40)


def test_a_pass_uses_every_index_at_most_once_and_passes_differ() -> None:
    lengths = [index % 13 + 1 for index in range(64)]
    batches = bucketed_batches(lengths, 8, steps=16, seed=0)
    first, second = batches[:8], batches[8:]
    for one_pass in (first, second):
        assert Counter(index for batch in one_pass for index in batch) == Counter(range(64))
    assert first != second
    assert batches == bucketed_batches(lengths, 8, steps=16, seed=0)
    assert batches != bucketed_batches(lengths, 8, steps=16, seed=1)


def test_batches_gather_similar_lengths() -> None:
    lengths = [1, 100] * 32
    for batch in bucketed_batches(lengths, 8, steps=8, seed=0):
        assert len({lengths[index] for index in batch}) == 1


def test_fewer_examples_than_a_batch_still_give_batches() -> None:
    assert [sorted(batch) for batch in bucketed_batches([1, 2, 3], 8, steps=2, seed=0)] == [
        [0, 1, 2],
        [0, 1, 2],
    ]


def test_no_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^the training data must not be empty$"):
        bucketed_batches([], 8, steps=1, seed=0)


def test_right_pad() -> None:
    ids, mask = right_pad([[5, 6, 7], [8]], fill=0)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[True] * 3, [True, False, False]]


def test_fit_takes_one_step_per_batch_and_leaves_frozen_weights() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(first.requires_grad_(False), second)
    frozen, free = first.weight.clone(), second.weight.clone()
    seen: list[int] = []
    fit(
        model,
        [[0], [1]],
        lambda batch: second(first(torch.full((1, 2), batch[0] + 1.0))).square().sum(),
        Schedule(lr=0.1, warmup_steps=1),
        on_step=lambda step, loss: seen.append(step),
    )
    assert seen == [1, 2]
    assert torch.equal(first.weight, frozen)
    assert not torch.equal(second.weight, free)
    assert not model.training
