"""Advantages as the loop makes them, for each estimator, against a calculation by hand."""

from __future__ import annotations

import pytest
import torch

from ppo.advantages import estimate_advantages
from ppo.config import PPOConfig

# two prompts with two responses each; the last response has one token only
MASK = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool()
SCORES = torch.tensor([1.0, 3.0, -2.0, 2.0])
KL = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 1.0], [2.0, 9.0]])  # the 9 does not count
# with beta 0.1 the rewards summed over each response: 0.9, 2.9, -2.2, 1.8
TOTALS = [0.9, 2.9, -2.2, 1.8]


def advantages(estimator: str, values: torch.Tensor | None = None, which: int = 0) -> torch.Tensor:
    ppo = PPOConfig(advantage_estimator=estimator, whiten_advantages=False, gae_lambda=1.0)
    how = {"kl_coef": 0.1, "num_samples": 2, "bootstrap_values": None, "impl": "auto"}
    return estimate_advantages(ppo, SCORES, KL, torch.zeros_like(KL), values, MASK, **how)[which]


def on_tokens(rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)[:, None] * MASK


def test_rloo_compares_with_the_other_response() -> None:
    expected = on_tokens([0.9 - 2.9, 2.9 - 0.9, -2.2 - 1.8, 1.8 + 2.2])
    torch.testing.assert_close(advantages("rloo"), expected)


def test_grpo_divides_by_the_groups_spread() -> None:
    half_root = 0.5**0.5  # of two numbers a, b: (a - mean)/std = ±1/√2, less what eps takes
    expected = on_tokens([-half_root, half_root, -half_root, half_root])
    torch.testing.assert_close(advantages("grpo"), expected, atol=2e-4, rtol=0)


def test_reinforce_pp_whitens_the_returns_to_go() -> None:
    togo = torch.tensor([[0.9, 0.95], [2.9, 2.9], [-2.2, -2.1], [1.8, 0.0]])
    counted = togo[MASK].double()
    expected = torch.where(MASK, (togo - counted.mean()) / counted.std(), 0.0).float()
    torch.testing.assert_close(advantages("reinforce_pp"), expected, atol=1e-5, rtol=1e-5)


def test_gae_with_a_critic_of_zeros_is_the_return_to_go() -> None:
    togo = torch.tensor([[0.9, 0.95], [2.9, 2.9], [-2.2, -2.1], [1.8, 0.0]])
    torch.testing.assert_close(advantages("gae", torch.zeros(4, 2)), togo)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "reinforce_pp"])
def test_returns_are_zero_without_a_critic(estimator: str) -> None:
    assert not advantages(estimator, which=1).any()
