"""Advantages without a critic: baselines from the other samples of a prompt, or from the batch.

`num_samples` responses of one prompt stand next to each other: rows 0..n−1 are the first prompt's.
A group is never split over ranks. With the KL in the reward, the `scores` of `rloo` and `grpo` are
those less β·Σ_t kl_t: `token_rewards(...).sum(1)`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo.reward_shaping import check_scores
from ppo.sections import PPOConfig
from ppo_kernels import gae, ppo_advantages, token_rewards, whiten


def estimate_advantages(
    ppo: PPOConfig,
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    *,
    kl_coef: float,
    num_samples: int,
    bootstrap_values: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns by `ppo.advantage_estimator`, KL in the reward.

    Args:
        ppo: the settings.
        scores: [B], the shaped scores.
        logprobs: [B,T], of the rollout.
        ref_logprobs: [B,T], of the reference.
        values: [B,T], V(s_t); None without a critic.
        response_mask: [B,T] bool.
        kl_coef: β of the KL in the reward; 0 where it is charged in the loss.
        num_samples: responses of each prompt.
        bootstrap_values: [B], V after the last token; None: 0.
        impl: of the operators.

    Returns:
        Two of [B,T]; without a critic the returns are 0 and nothing reads them.
    """
    # the exact KL is there already, per token: k1 of it against 0 is itself
    estimator = "k1" if ppo.kl_estimator == "exact" else ppo.kl_estimator
    if values is not None:
        advantages, returns, moments = ppo_advantages(
            scores,
            logprobs,
            ref_logprobs,
            values,
            response_mask,
            kl_coef=kl_coef,
            estimator=estimator,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
            bootstrap_values=bootstrap_values,
            impl=impl,
        )
        if ppo.whiten_advantages:
            advantages = whiten(advantages, response_mask, moments=moments, impl=impl)
        return advantages, returns
    rewards = token_rewards(
        scores,
        logprobs,
        ref_logprobs,
        response_mask,
        kl_coef=kl_coef,
        estimator=estimator,
        impl=impl,
    )
    if ppo.advantage_estimator == "reinforce_pp":
        advantages = reinforce_pp(rewards, response_mask, gamma=ppo.gamma, impl=impl)
    elif ppo.advantage_estimator == "rloo":
        advantages = rloo(rewards.sum(1), response_mask, num_samples=num_samples)
    else:
        advantages = grpo(rewards.sum(1), response_mask, num_samples=num_samples)
    return advantages, torch.zeros_like(advantages)


@torch.no_grad()
def rloo(scores: Tensor, response_mask: Tensor, *, num_samples: int) -> Tensor:
    """Compare each score with the mean of the prompt's other ones (REINFORCE leave-one-out).

    Â_i,t = s_i − 1/(n − 1)·Σ_{j≠i} s_j

    Args:
        scores: [B] floating, s: whole groups, each of n rows.
        response_mask: [B, T] bool, True = the token counts.
        num_samples: n ≥ 2; a single sample has no others.

    Returns:
        [B, T], dtype of scores: the same at every token that counts, 0 elsewhere. Not whitened:
        the scale is that of the scores. A row without tokens still counts for its group.

    Raises:
        ValueError: a shape is wrong, n < 2, no whole groups, or a score is not finite.
        TypeError: the scores are not floating, or the mask is not bool.

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!",
    https://openreview.net/forum?id=r1lgTGL5DE; for language models Ahmadian et al. 2024,
    "Back to Basics", https://arxiv.org/abs/2402.14740.
    """
    deviations = _deviations(scores, response_mask, num_samples, "rloo")
    # s_i less the others' mean is n/(n−1) times s_i less the mean of all
    return _spread(deviations * (num_samples / (num_samples - 1)), response_mask)


@torch.no_grad()
def grpo(
    scores: Tensor,
    response_mask: Tensor,
    *,
    num_samples: int,
    scale_by_std: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """Compare each score with its prompt's mean, in units of its prompt's spread.

    Â_i,t = (s_i − μ)/(σ + ε),  σ² = Σ_j (s_j − μ)²/(n − 1);  scale_by_std=False: s_i − μ

    The division gives prompts on which all answers are nearly alike as much weight as the others;
    without it (Dr. GRPO) the weight follows the spread.

    Args:
        scores: [B] floating, s: whole groups, each of n rows.
        response_mask: [B, T] bool, True = the token counts.
        num_samples: n ≥ 2; the mean of one sample is itself.
        scale_by_std: False leaves out the division.
        eps: ε > 0, finite.

    Returns:
        [B, T], dtype of scores: the same at every token that counts, 0 elsewhere; a group of equal
        scores is 0. A row without tokens still counts for its group.

    Raises:
        ValueError: a shape is wrong, n < 2, no whole groups, a score is not finite, or `eps` is
            not positive and finite.
        TypeError: the scores are not floating, or the mask is not bool.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2, https://arxiv.org/abs/2402.03300 (it
    leaves open n or n − 1: n − 1 here, as in TRL and verl); without σ: Liu et al. 2025,
    "Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783.
    """
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps}")
    deviations = _deviations(scores, response_mask, num_samples, "grpo")
    if scale_by_std:
        variance = deviations.square().sum(1, keepdim=True) / (num_samples - 1)
        deviations = deviations / (variance.sqrt() + eps)
    return _spread(deviations, response_mask)


def returns_to_go(
    rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0, impl: str = "auto"
) -> Tensor:
    """Add up the rewards from each token on: GAE with V = 0 and λ = 1.

    G_t = r_t + γ·G_{t+1}, where t+1 is the next token that counts

    Args:
        rewards: [B, T] floating, r_t.
        response_mask: [B, T] bool, True = the token counts.
        gamma: γ in [0, 1].
        impl: as in `ppo_kernels.gae`.

    Returns:
        [B, T] fp32; masked positions are 0, whatever they hold.

    Raises:
        ValueError, TypeError: as `ppo_kernels.gae`.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, response_mask, gamma=gamma, gae_lambda=1.0, impl=impl)[0]


def reinforce_pp(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    moments: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Whiten the returns over the whole batch (REINFORCE++): one sample per prompt will do.

    Â_t = (G_t − μ)/sqrt(σ² + ε),  G_t = r_t + γ·G_{t+1};  μ, σ² over all tokens that count

    Args:
        rewards: [B, T] floating, r_t: score and KL penalty, from `token_rewards`.
        response_mask: [B, T] bool, True = the token counts.
        gamma: γ in [0, 1].
        moments: [3], those of `returns_to_go` on all ranks (`combine_moments`). None: this batch's.
        impl: as in `ppo_kernels.gae`.

    Returns:
        [B, T] fp32; masked positions are 0, whatever they hold. Equal returns give 0.

    Raises:
        ValueError, TypeError: as `ppo_kernels.gae` and `ppo_kernels.whiten`.

    Source: Hu et al. 2025, "REINFORCE++", the equations of its token-level KL and of its global
    advantage normalisation, https://arxiv.org/abs/2501.03262.
    """
    returns = returns_to_go(rewards, response_mask, gamma=gamma, impl=impl)
    return whiten(returns, response_mask, moments=moments, impl=impl)


def _deviations(scores: Tensor, response_mask: Tensor, num_samples: int, name: str) -> Tensor:
    """Each score less its group's mean, [B/n, n]."""
    if not scores.dtype.is_floating_point:
        raise TypeError(f"scores must be a floating-point tensor, got {scores.dtype}")
    if scores.dim() != 1:
        raise ValueError(f"scores must have shape [B], got {list(scores.shape)}")
    if response_mask.dtype != torch.bool:
        raise TypeError(
            f"response_mask must be bool (True = the token counts), got {response_mask.dtype}"
        )
    if response_mask.dim() != 2 or len(response_mask) != len(scores):
        raise ValueError(
            f"response_mask must have shape [{len(scores)}, T] (the batch of scores), "
            f"got {list(response_mask.shape)}"
        )
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2 for {name}, got {num_samples}")
    if len(scores) % num_samples:
        raise ValueError(
            f"scores must hold whole groups of {num_samples} (num_samples), got {len(scores)}"
        )
    check_scores(scores, "scores")
    groups = scores.view(len(scores) // num_samples, num_samples)
    # from the first of the group, not from 0: equal scores then differ by exactly 0
    groups = groups - groups[:, :1]
    return groups - groups.mean(1, keepdim=True)


def _spread(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Put each row's advantage on its tokens that count."""
    return torch.where(response_mask, advantages.reshape(-1, 1), 0.0)
