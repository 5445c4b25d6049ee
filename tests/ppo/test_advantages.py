"""Estimators without a critic, against arithmetic on paper and identities."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppo.advantages import grpo, reinforce_pp, returns_to_go, rloo
from ppo_kernels import combine_moments, masked_moments

nan = float("nan")
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()


def per_row(estimate: Callable[..., Tensor], scores: list[float], **options: float) -> list[float]:
    """The advantages of rows of one token."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    given = torch.tensor(scores, dtype=torch.float32)
    return estimate(given, mask, **options)[:, 0].tolist()


def test_rloo_on_paper() -> None:
    # others' means: (2 + 6)/2 = 4, (1 + 6)/2 = 3.5, (1 + 2)/2 = 1.5; second prompt 0, 0, −1.5
    found = per_row(rloo, [1, 2, 6, -3, 0, 0], num_samples=3)
    assert found == pytest.approx([-3, -1.5, 4.5, -3, 1.5, 1.5])


def test_rloo_with_two_samples_is_their_difference() -> None:
    assert per_row(rloo, [5, 2], num_samples=2) == pytest.approx([3, -3])


def test_grpo_on_paper() -> None:
    # mean 3, deviations −2, −1, 3, σ = sqrt(14/2) = 2.645751; second prompt: σ = sqrt(6/2)
    found = per_row(grpo, [1, 2, 6, -3, 0, 0], num_samples=3, eps=1e-12)
    first = [deviation / math.sqrt(7) for deviation in (-2, -1, 3)]
    assert found == pytest.approx([*first, *(d / math.sqrt(3) for d in (-2, 1, 1))])


def test_grpo_adds_eps_to_the_standard_deviation() -> None:
    # σ of (1, 3) is sqrt(2)
    found = per_row(grpo, [1, 3], num_samples=2, eps=0.5)
    assert found == pytest.approx([-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)])


def test_without_the_deviation_grpo_is_rloo_up_to_the_factor_n_over_n_minus_1() -> None:
    scores = [0.3, 1.7, -2.0, 0.9, 4.0, 4.5, 3.0, 1.0]
    plain = per_row(grpo, scores, num_samples=4, scale_by_std=False)
    assert plain[:4] == pytest.approx([0.075, 1.475, -2.225, 0.675])  # less their mean, 0.225
    assert [4 / 3 * x for x in plain] == pytest.approx(per_row(rloo, scores, num_samples=4))


def test_grpo_knows_neither_offset_nor_scale() -> None:
    scores = torch.tensor([0.3, 1.7, -2.0, 0.9], dtype=torch.float64)
    mask = torch.ones(4, 1, dtype=torch.bool)
    plain = grpo(scores, mask, num_samples=4, eps=1e-12)
    torch.testing.assert_close(grpo(7 * scores - 40, mask, num_samples=4, eps=1e-12), plain)


@pytest.mark.parametrize("estimate", [rloo, grpo])
@pytest.mark.parametrize("score", [0.1, -7.3, 1e-30, 3e4])
def test_equal_scores_teach_nothing(estimate: Callable[..., Tensor], score: float) -> None:
    """0.1 three times has a float32 mean that is not 0.1."""
    assert per_row(estimate, [score] * 3 + [1.0, 2.0, 3.0], num_samples=3)[:3] == [0, 0, 0]


@pytest.mark.parametrize("estimate", [rloo, grpo])
def test_a_row_has_one_advantage_at_the_tokens_that_count(
    estimate: Callable[..., Tensor],
) -> None:
    scores = torch.tensor([1.0, 2.0, 6.0, 3.0])
    advantages = estimate(scores, MASK, num_samples=4)  # the empty row counts for the mean, 3
    assert advantages[~MASK].eq(0).all()
    assert advantages[0, 0] == advantages[0, 1] < advantages[1, 0] < 0 < advantages[2, 0]
    alone = estimate(scores, torch.ones(4, 1, dtype=torch.bool), num_samples=4)
    assert torch.equal(advantages[:3, :1], alone[:3])


@pytest.mark.parametrize("estimate", [rloo, grpo])
def test_no_rows_and_no_tokens(estimate: Callable[..., Tensor]) -> None:
    nothing = estimate(torch.zeros(0), torch.zeros(0, 5, dtype=torch.bool), num_samples=2)
    assert nothing.shape == (0, 5)
    empty = estimate(torch.zeros(2), torch.zeros(2, 0, dtype=torch.bool), num_samples=2)
    assert empty.shape == (2, 0)


@pytest.mark.parametrize("name", ["rloo", "grpo"])
@pytest.mark.parametrize(
    ("scores", "samples", "kind", "message"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1, ValueError, "num_samples must be at least 2 for {}, got 1"),
        (
            [1.0, 2.0, 3.0, 4.0],
            3,
            ValueError,
            "scores must hold whole groups of 3 (num_samples), got 4",
        ),
        (
            [1.0, 2.0, nan, 4.0],
            2,
            ValueError,
            "scores must be finite, got nan for sample 2 of the batch",
        ),
        (
            [1.0, 2.0],
            2,
            ValueError,
            "response_mask must have shape [2, T] (the batch of scores), got [4, 3]",
        ),
        ([[1.0], [2.0]], 2, ValueError, "scores must have shape [B], got [2, 1]"),
    ],
)
def test_wrong_groups_are_refused(
    name: str, scores: list[float], samples: int, kind: type[Exception], message: str
) -> None:
    estimate = {"rloo": rloo, "grpo": grpo}[name]
    with pytest.raises(kind, match="must") as error:
        estimate(torch.tensor(scores), MASK, num_samples=samples)
    assert str(error.value) == message.format(name)


def test_wrong_dtypes_and_a_zero_eps_are_refused() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with pytest.raises(TypeError, match=r"^scores must be a floating-point tensor, got torch.int"):
        rloo(scores.long(), MASK, num_samples=2)
    expected = r"^response_mask must be bool \(True = the token counts\), got torch.float32$"
    with pytest.raises(TypeError, match=expected):
        rloo(scores, MASK.float(), num_samples=2)
    with pytest.raises(ValueError, match=r"^eps must be positive and finite, got 0$"):
        grpo(scores, MASK, num_samples=2, eps=0)


def test_returns_to_go_on_paper() -> None:
    rewards = torch.tensor([[1.0, nan, 2.0, 4.0], [-1.0, 3.0, nan, nan]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    # 4;  2 + 4/2 = 4;  1 + 4/2 = 3 across the hole;   3;  −1 + 3/2
    expected = [[3.0, 0.0, 4.0, 4.0], [0.5, 3.0, 0.0, 0.0]]
    assert returns_to_go(rewards, mask, gamma=0.5).tolist() == expected


def test_reinforce_pp_on_paper() -> None:
    """Scores 1 and −1 at the end, β·KL of 0.5 at each token: A_t = r − β·Σ_{i≥t} KL_i, whitened."""
    rewards = torch.tensor([[-0.5, 0.5], [-1.5, nan]])
    mask = torch.tensor([[True, True], [True, False]])
    # returns 0, 0.5, −1.5: mean −1/3, squared deviations 1/9 + 25/36 + 49/36 = 13/6, σ² = 13/12
    sigma = math.sqrt(13 / 12)
    expected = [1 / 3 / sigma, 5 / 6 / sigma, -7 / 6 / sigma, 0]
    found = reinforce_pp(rewards, mask).flatten().tolist()
    assert found == pytest.approx(expected, rel=1e-6)


def test_reinforce_pp_discounts() -> None:
    """γ = 0 leaves each token its own reward: 1 and 2, σ² = ½. (γ = 1 would turn them round.)"""
    found = reinforce_pp(torch.tensor([[1.0, 2.0]]), MASK[:1, :2], gamma=0.0)
    assert found.flatten().tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_two_ranks_whiten_as_one() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(4, 3, generator=generator)
    halves = [(rewards[:2], MASK[:2]), (rewards[2:], MASK[2:])]
    moments = combine_moments(
        torch.stack([masked_moments(returns_to_go(*half), half[1]) for half in halves])
    )
    parts = [reinforce_pp(*half, moments=moments) for half in halves]
    torch.testing.assert_close(torch.cat(parts), reinforce_pp(rewards, MASK))
    assert not torch.allclose(parts[0], reinforce_pp(*halves[0]))


@pytest.mark.parametrize("tokens", [1, 3])
def test_reinforce_pp_of_equal_returns_is_zero(tokens: int) -> None:
    rewards = torch.zeros(1, tokens)
    rewards[0, -1] = 0.1
    assert reinforce_pp(rewards, MASK[2:3, :tokens]).tolist() == [[0.0] * tokens]
