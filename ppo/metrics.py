"""The figures of one PPO step, under the names that TRL users' dashboards know.

`ppo/README.md` explains each in a line. All are means over tokens that count or over sequences;
padding never enters. KL is in nats, once as a sum per sequence and once per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo.batch import Rollout
from ppo.update import UpdateStats
from ppo_kernels import kl_penalty


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True, 0 where nothing is."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R − V)/Var(R) over the tokens that count: 1 is a perfect critic, 0 a constant one."""
    returns, errors = returns[mask], (returns - values)[mask]
    variance = returns.var(correction=0)
    return 1 - errors.var(correction=0) / variance if variance > 0 else torch.tensor(0.0)


def rollout_metrics(
    rollout: Rollout,
    *,
    scores: Tensor,
    shaped_scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    entropy: Tensor,
    values: Tensor | None,
    returns: Tensor | None,
    kl_coef: float,
    kl_estimator: str,
    eos_ids: Sequence[int],
) -> dict[str, float]:
    """Figures of the sampled responses and of how the frozen models see them."""
    mask = rollout.response_mask
    lengths = mask.sum(1)
    kl = kl_penalty(logprobs, ref_logprobs, estimator=kl_estimator, response_mask=mask)
    non_score_reward = -kl_coef * kl.sum(1).mean()
    eos = torch.isin(rollout.responses, torch.tensor(list(eos_ids), device=mask.device)) & mask
    figures = {
        "objective/scores": scores.mean(),
        "objective/kl": kl.sum(1).mean(),
        "objective/kl_per_token": masked_mean(kl, mask),
        "objective/shaped_scores": shaped_scores.mean(),
        "objective/rlhf_reward": shaped_scores.mean() + non_score_reward,
        "objective/non_score_reward": non_score_reward,
        "objective/entropy": -logprobs.sum(1).mean(),
        "policy/entropy_avg": masked_mean(entropy, mask),
        "val/num_eos_tokens": eos.sum(),
        "tokens/response_length_mean": lengths.float().mean(),
        "tokens/response_length_max": lengths.max(),
        "tokens/truncated_frac": (~rollout.finished).float().mean(),
    }
    if values is not None and returns is not None:
        figures["val/explained_variance"] = explained_variance(values, returns, mask)
    distinct = {tuple(row) for row in rollout.responses.tolist()}
    return {
        **{name: float(figure) for name, figure in figures.items()},
        "objective/kl_coef": kl_coef,
        "samples/distinct_frac": len(distinct) / len(rollout.responses),
    }


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Means over the optimiser steps of one PPO step, and how many there were."""
    figures: dict[str, list[Tensor]] = {
        "policy/approxkl_avg": [u.loss.policy.approx_kl for u in updates],
        "policy/clipfrac_avg": [u.loss.policy.clipfrac for u in updates],
        "policy/grad_norm": [u.actor_grad_norm for u in updates],
        "loss/policy_avg": [u.loss.policy.loss for u in updates],
        "val/ratio": [u.loss.policy.ratio_mean for u in updates],
        "val/ratio_var": [u.loss.policy.ratio_var for u in updates],
    }
    if all(u.critic_grad_norm is not None for u in updates):
        figures |= {
            "loss/value_avg": [u.loss.value.loss for u in updates],
            "val/clipfrac_avg": [u.loss.value.clipfrac for u in updates],
            "value/grad_norm": [
                u.critic_grad_norm for u in updates if u.critic_grad_norm is not None
            ],
        }
    means = {name: float(torch.stack(each).mean()) for name, each in figures.items() if each}
    return {**means, "policy/updates": len(updates)}
