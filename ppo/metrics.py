"""The figures of one PPO step, under the names that TRL users' dashboards know.

`ppo/README.md` explains each in a line. All are means over tokens that count or over sequences;
padding never enters. KL is in nats, once as a sum per sequence and once per token.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo.batch import Rollout
from ppo.look import Look
from ppo.update import UpdateStats


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
    look: Look,
    *,
    scores: Tensor,
    shaped_scores: Tensor,
    returns: Tensor,
    kl_coef: float,
    kl_in_loss: bool,
    eos_ids: Sequence[int],
) -> dict[str, float]:
    """Figures of the sampled responses and of how the frozen models see them."""
    mask = rollout.response_mask
    lengths = mask.sum(1)
    kl = look.kl
    non_score_reward = -(0.0 if kl_in_loss else kl_coef) * kl.sum(1).mean()
    eos = torch.isin(rollout.responses, torch.tensor(list(eos_ids), device=mask.device)) & mask
    figures = {
        "objective/scores": scores.mean(),
        "objective/kl": kl.sum(1).mean(),
        "objective/kl_per_token": masked_mean(kl, mask),
        "objective/shaped_scores": shaped_scores.mean(),
        "objective/rlhf_reward": shaped_scores.mean() + non_score_reward,
        "objective/non_score_reward": non_score_reward,
        "objective/entropy": -look.logprobs.sum(1).mean(),
        "policy/entropy_avg": masked_mean(look.entropy, mask),
        "val/num_eos_tokens": eos.sum(),
        "tokens/response_length_mean": lengths.float().mean(),
        "tokens/response_length_max": lengths.max(),
        "tokens/truncated_frac": (~rollout.finished).float().mean(),
    }
    if look.values is not None:
        figures["val/explained_variance"] = explained_variance(look.values, returns, mask)
    distinct = {tuple(row) for row in rollout.responses.tolist()}
    return {
        **{name: float(figure) for name, figure in figures.items()},
        "objective/kl_coef": kl_coef,
        "samples/distinct_frac": len(distinct) / len(rollout.responses),
    }


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Means over the optimiser steps of one PPO step (of what trained), and how many there were."""
    policies = [u.policy for u in updates if u.policy is not None]
    values = [u.value for u in updates if u.value is not None]
    figures: dict[str, list[Tensor | None]] = {
        "policy/approxkl_avg": [each.approx_kl for each in policies],
        "policy/clipfrac_avg": [each.clipfrac for each in policies],
        "policy/grad_norm": [u.actor_grad_norm for u in updates],
        "loss/policy_avg": [each.loss for each in policies],
        "loss/kl_avg": [u.kl for u in updates],
        "loss/ptx_avg": [u.supervised for u in updates],
        "val/ratio": [each.ratio_mean for each in policies],
        "val/ratio_var": [each.ratio_var for each in policies],
        "loss/value_avg": [each.loss for each in values],
        "val/clipfrac_avg": [each.clipfrac for each in values],
        "value/grad_norm": [u.critic_grad_norm for u in updates],
    }
    found = {
        name: [each for each in column if each is not None] for name, column in figures.items()
    }
    means = {name: float(torch.stack(each).mean()) for name, each in found.items() if each}
    ratios = [float(u.ratio_max) for u in updates if u.ratio_max is not None]
    if ratios:
        means["val/ratio_max"] = max(ratios)
    bad = sum(u.actor_grad_norm is None and u.critic_grad_norm is None for u in updates)
    return {**means, "policy/updates": len(updates) - bad, "policy/skipped": bad}


def phase_seconds(clock: Sequence[float], tokens: int) -> dict[str, float]:
    """Seconds of generation, scoring and update, and prompt and response tokens per second."""
    names = ("time/generate", "time/score", "time/update")
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(names)}
    total = clock[-1] - clock[0]
    return {**seconds, "time/step": total, "perf/tokens_per_s": tokens / total}


def peak_memory_gb(device: torch.device) -> float:
    """Highest memory so far, in 10⁹ bytes: of tensors on a GPU, elsewhere of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) / 1e9
