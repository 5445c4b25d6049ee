"""The specification: every operator in plain PyTorch, with the full logits and no tricks.

Each function computes in float32, or in float64 when an argument is float64, and autograd gives
its gradient. What does not count is replaced by `torch.where` before any arithmetic, so that
neither values nor gradients can see it. Arguments are not checked here: the public functions of
the same names do that. Names, shapes and symbols are those of `ppo_kernels/README.md`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import linear

from ppo_kernels.outputs import (
    LinearPPOLoss,
    PolicyLoss,
    PPOAdvantages,
    PPOLoss,
    TokenStatistics,
    ValueLoss,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

IGNORE_INDEX = -100
MAX_K3_EXPONENT = 88.0  # exp(88) = 1.7e38: the last whole exponent that float32 holds
MAX_K2_DISTANCE = 1.8e19  # its square is about the largest number that float32 holds
MAX_LOG_RATIO = 40.0  # exp(40)² = 5.5e34: the ratio's variance still fits in float32


class Scale(TypedDict, total=False):
    temperature: float
    vocab_size: int | None


class Head(TypedDict, total=False):
    logit_scale: float
    logit_softcap: float | None


class Discount(TypedDict, total=False):
    gamma: float
    gae_lambda: float
    bootstrap_values: Tensor | None


class Clip(TypedDict, total=False):
    cliprange: float
    cliprange_high: float | None
    dual_clip: float | None


def log_softmax(
    logits: Tensor, valid: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None
) -> Tensor:
    z = torch.where(valid.unsqueeze(-1), _upcast(logits[..., :vocab_size])[0], 0)
    return (z / temperature).log_softmax(-1)


def token_logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, *, response_mask: Tensor | None = None, **scale: Unpack[Scale]
) -> tuple[Tensor, Tensor]:
    counted = _counted(tokens, response_mask)
    inside = (tokens >= 0) & (tokens < (scale.get("vocab_size") or logits.shape[-1]))
    logp = log_softmax(logits, counted & inside, **scale)
    logprobs = logp.gather(-1, torch.where(inside, tokens, 0).unsqueeze(-1)).squeeze(-1)
    p = logp.exp()
    entropy = -(p * torch.where(p > 0, logp, 0)).sum(-1)
    no_token = torch.where(inside, 0.0, math.nan).to(logp.dtype)
    return (
        torch.where(counted, logprobs + no_token, 0),
        torch.where(counted, entropy + no_token, 0),
    )


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, response_mask: Tensor | None = None, **scale: Unpack[Scale]
) -> Tensor:
    return token_logprobs_and_entropy(logits, tokens, response_mask=response_mask, **scale)[0]


def categorical_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    response_mask: Tensor | None = None,
    **scale: Unpack[Scale],
) -> Tensor:
    logits, ref_logits = _upcast(logits, ref_logits)
    everywhere = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    counted = everywhere if response_mask is None else response_mask
    logp = log_softmax(logits, counted, **scale)
    ref_logp = log_softmax(ref_logits.detach(), counted, **scale)
    p = logp.exp()
    kl = (p * torch.where(p > 0, logp - ref_logp, 0)).sum(-1)
    return torch.where(counted, kl, 0)


def token_statistics(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    *,
    response_mask: Tensor | None = None,
    **scale: Unpack[Scale],
) -> TokenStatistics:
    logits, ref_logits = _upcast(logits, ref_logits.detach())
    counted = _counted(tokens, response_mask)
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, response_mask=counted, **scale)
    ref_logprobs = token_logprobs(ref_logits, tokens, response_mask=counted, **scale)
    kl = categorical_kl(logits, ref_logits, response_mask=counted, **scale)
    no_token = (tokens < 0) | (tokens >= (scale.get("vocab_size") or logits.shape[-1]))
    kl = torch.where(counted & no_token, math.nan, kl)
    return TokenStatistics(logprobs, entropy, kl, ref_logprobs)


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: str = "k1",
    response_mask: Tensor | None = None,
) -> Tensor:
    logprobs, ref_logprobs = _upcast(logprobs, ref_logprobs)
    if response_mask is not None:
        logprobs = torch.where(response_mask, logprobs, 0)
        ref_logprobs = torch.where(response_mask, ref_logprobs, 0)
    delta = logprobs - ref_logprobs
    if estimator == "k1":
        return delta
    if estimator == "abs":
        return delta.abs()
    if estimator == "k2":
        distance = delta.clamp(-MAX_K2_DISTANCE, MAX_K2_DISTANCE)
        return _with_slope(delta, 0.5 * distance * distance, distance)
    if estimator == "k3":
        exponent = (-delta).clamp(max=MAX_K3_EXPONENT)
        beyond = (delta + MAX_K3_EXPONENT).clamp(max=0)  # what the clamp took from −Δ
        return _with_slope(delta, _expm1_minus(exponent) + beyond, -torch.expm1(exponent))
    raise ValueError(f"estimator must be 'k1', 'abs', 'k2' or 'k3', got {estimator!r}")


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
) -> Tensor:
    scores, logprobs, ref_logprobs = _upcast(scores, logprobs, ref_logprobs)
    kl = kl_penalty(logprobs, ref_logprobs, estimator=estimator, response_mask=response_mask)
    left_to_count = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (left_to_count == 1)
    return torch.where(is_last, scores.unsqueeze(-1), 0) - kl_coef * kl


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if bootstrap_values is None:
        bootstrap_values = values.new_zeros(values.shape[0])
    rewards, values, next_value = _upcast(rewards, values, bootstrap_values)
    mask = torch.ones_like(values, dtype=torch.bool) if response_mask is None else response_mask
    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(next_value)  # of the next token that counts
    for t in reversed(range(values.shape[1])):
        counted, value = mask[:, t], values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        advantage = torch.where(counted, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(counted, value, next_value)
        advantages[:, t] = torch.where(counted, advantage, 0)
    return advantages, torch.where(mask, advantages + values, 0)


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    (x,) = _upcast(x)
    count = mask.sum().to(x.dtype)
    mean = torch.where(mask, x, 0).sum() / count.clamp(min=1)
    m2 = torch.where(mask, x - mean, 0).square().sum()
    return torch.stack([count, mean, m2])


@torch.no_grad()
def combine_moments(moments: Tensor) -> Tensor:
    count, mean, m2 = torch.where(moments[:, :1] > 0, moments, 0).unbind(-1)
    total = count.sum()
    joint_mean = (count * mean).sum() / total.clamp(min=1)
    joint_m2 = m2.sum() + (count * (mean - joint_mean).square()).sum()
    return torch.stack([total, joint_mean, joint_m2])


@torch.no_grad()
def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
    moments: Tensor | None = None,
) -> Tensor:
    (x,) = _upcast(x)
    count, mean, m2 = (masked_moments(x, mask) if moments is None else moments.to(x)).unbind()
    var = m2 / (count - 1).clamp(min=1)
    y = (x - mean) * torch.rsqrt(var + eps)
    return torch.where(mask, y if shift_mean else y + mean, 0)


@torch.no_grad()
def ppo_advantages(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    estimator: str = "k1",
    **discount: Unpack[Discount],
) -> PPOAdvantages:
    rewards = token_rewards(
        scores, logprobs, ref_logprobs, response_mask, kl_coef=kl_coef, estimator=estimator
    )
    advantages, returns = gae(rewards, values, response_mask, **discount)
    return PPOAdvantages(advantages, returns, masked_moments(advantages, response_mask))


def token_weights(
    response_mask: Tensor,
    mode: str = "token-mean",
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
) -> Tensor:
    mask = response_mask.to(torch.float32)
    lengths = mask.sum(-1, keepdim=True)
    tokens = mask.sum() if num_tokens is None else num_tokens
    sequences = (lengths > 0).sum() if num_sequences is None else num_sequences
    if mode == "token-mean":
        weights = mask / tokens
    elif mode == "seq-mean-token-mean":
        weights = mask / lengths / sequences
    elif mode == "seq-mean-token-sum":
        weights = mask / sequences
    else:
        raise ValueError(
            "mode must be 'token-mean', 'seq-mean-token-mean' or 'seq-mean-token-sum', "
            f"got {mode!r}"
        )
    return torch.where(response_mask, weights, 0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyLoss:
    counted, w, count = _weights(weights, logprobs, old_logprobs, advantages)
    logprobs, old_logprobs, a = _upcast(logprobs, old_logprobs.detach(), advantages.detach())
    log_ratio = torch.where(counted, logprobs, 0) - torch.where(counted, old_logprobs, 0)
    a = torch.where(counted, a, 0)

    exponent = log_ratio.clamp(max=MAX_LOG_RATIO)
    ratio = _with_slope(log_ratio, exponent.exp(), exponent.exp())
    high = cliprange if cliprange_high is None else cliprange_high
    unclipped = -a * ratio
    clipped = -a * ratio.clamp(1 - cliprange, 1 + high)
    per_token = torch.where(unclipped >= clipped, unclipped, clipped)
    if dual_clip is not None:
        cap = -dual_clip * a
        per_token = torch.where((a < 0) & (per_token > cap), cap, per_token)
    loss = torch.where(counted, w * per_token, 0).sum()

    ratio, log_ratio, exponent = ratio.detach(), log_ratio.detach(), exponent.detach()
    beyond = (MAX_LOG_RATIO - log_ratio).clamp(max=0)  # what the clamp took from ℓ
    ratio_mean = _mean(ratio, counted, count)
    return PolicyLoss(
        loss=loss,
        clipfrac=_mean(clipped > unclipped, counted, count),
        approx_kl=_mean(_expm1_minus(exponent) + beyond, counted, count),
        ratio_mean=ratio_mean,
        ratio_var=_mean((ratio - ratio_mean).square(), counted, count),
        count=count,
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    cliprange_value: float | None = 0.2,
) -> ValueLoss:
    counted, w, count = _weights(weights, values, old_values, returns)
    values, old_values, returns = _upcast(values, old_values.detach(), returns.detach())
    v = torch.where(counted, values, 0)
    v_old = torch.where(counted, old_values, 0)
    target = torch.where(counted, returns, 0)
    # clamp(v) rather than v_old + clamp(v − v_old): inside the range it is v to the last bit
    width = math.inf if cliprange_value is None else cliprange_value
    clipped = (torch.clamp(v, v_old - width, v_old + width) - target).square()
    unclipped = (v - target).square()
    per_token = torch.where(unclipped >= clipped, unclipped, clipped)
    loss = 0.5 * torch.where(counted, w * per_token, 0).sum()
    return ValueLoss(loss, _mean(clipped > unclipped, counted, count), count)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 0.1,
    **clip: Unpack[Clip],
) -> PPOLoss:
    policy = policy_loss(logprobs, old_logprobs, advantages, weights, **clip)
    value = value_loss(values, old_values, returns, weights, cliprange_value=cliprange_value)
    return PPOLoss(
        loss=policy.loss + vf_coef * value.loss,
        policy=policy._replace(loss=policy.loss.detach()),
        value=value._replace(loss=value.loss.detach()),
    )


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counted: Tensor | None,
    *,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Tensor:
    hidden, weight = _upcast(hidden, weight)
    if counted is not None:
        hidden = torch.where(counted.unsqueeze(-1), hidden, 0)
    logits = logit_scale * linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))
    return logits if logit_softcap is None else logit_softcap * torch.tanh(logits / logit_softcap)


def linear_token_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
    **head: Unpack[Head],
) -> tuple[Tensor, Tensor]:
    counted = _counted(tokens, response_mask)
    logits = linear_logits(hidden, weight, bias, counted, **head)
    return token_logprobs_and_entropy(
        logits, tokens, temperature=temperature, response_mask=counted
    )


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
    **head: Unpack[Head],
) -> Tensor:
    counted = _counted(tokens, response_mask)
    logits = linear_logits(hidden, weight, bias, counted, **head)
    return token_logprobs(logits, tokens, temperature=temperature, response_mask=counted)


def linear_categorical_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    response_mask: Tensor | None = None,
    **head: Unpack[Head],
) -> Tensor:
    logits = linear_logits(hidden, weight, bias, response_mask, **head)
    ref_logits = linear_logits(ref_hidden, ref_weight, ref_bias, response_mask, **head)
    return categorical_kl(logits, ref_logits, temperature=temperature, response_mask=response_mask)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entropy_coef: float = 0.0,
    **clip: Unpack[Clip],
) -> LinearPPOLoss:
    weights = torch.where(tokens != IGNORE_INDEX, weights, 0).to(weights.dtype)
    counted, w, count = _weights(weights, hidden, weight, old_logprobs, advantages)
    logprobs, entropy = linear_token_logprobs_and_entropy(
        hidden,
        weight,
        tokens,
        bias=bias,
        temperature=temperature,
        response_mask=counted,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )
    policy = policy_loss(logprobs, old_logprobs, advantages, weights, **clip)
    return LinearPPOLoss(
        loss=policy.loss - entropy_coef * torch.where(counted, w * entropy, 0).sum(),
        policy=policy._replace(loss=policy.loss.detach()),
        entropy=_mean(entropy.detach(), counted, count),
        ratio_max=_ratio_max(logprobs.detach(), old_logprobs, counted),
    )


def _ratio_max(logprobs: Tensor, old_logprobs: Tensor, counted: Tensor) -> Tensor:
    log_ratio = torch.where(counted, logprobs - old_logprobs, -math.inf).flatten()
    none = log_ratio.new_full((1,), -math.inf)
    return torch.cat([log_ratio, none]).amax().clamp(max=MAX_LOG_RATIO).exp()


def _upcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = _compute_dtype(*tensors)
    return tuple(t.to(dtype) for t in tensors)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _counted(tokens: Tensor, response_mask: Tensor | None) -> Tensor:
    named = tokens != IGNORE_INDEX
    return named if response_mask is None else named & response_mask


def _weights(weights: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens count, their weights (1/count for a mask), and how many they are."""
    counted = weights != 0
    count = counted.sum().to(_compute_dtype(*inputs))
    w = weights.detach().to(count.dtype)
    return counted, (w / count.clamp(min=1) if weights.dtype == torch.bool else w), count


def _mean(x: Tensor, counted: Tensor, count: Tensor) -> Tensor:
    return torch.where(counted, x, 0).sum() / count.clamp(min=1)


def _expm1_minus(x: Tensor) -> Tensor:
    """eˣ − 1 − x: near 0 from its series, because expm1(x) − x cancels there."""
    near = x.clamp(-0.5, 0.5)
    series = torch.ones_like(x)
    for n in range(16, 2, -1):
        series = 1 + series * near / n
    return torch.where(x.abs() < 0.5, 0.5 * near * near * series, torch.expm1(x) - x)


def _with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """`value`, but with d value/dx = `slope` (a clamp inside `value` would make it 0)."""
    zero = torch.where(x.isfinite(), x - x.detach(), 0)
    return value.detach() + slope.detach() * zero
