"""The clipped policy loss of PPO, from hidden states and the LM head."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import (
    check_clip,
    check_finite,
    check_floating,
    check_tokens,
    check_weights,
)
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._linear import ppo
from ppo_kernels._linear.checks import check_linear
from ppo_kernels._linear.rows import flat_hidden, ignore
from ppo_kernels.outputs import LinearPPOLoss, PolicyLoss
from ppo_kernels.reference import IGNORE_INDEX


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
    cliprange: float = 0.2,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    chunk_bytes: int | None = None,
    impl: str = "auto",
) -> LinearPPOLoss:
    """Compute the policy loss with its gradients in one sweep over chunks of tokens.

    L = Σ_t w_t·[max(−Â_t·ρ_t, −Â_t·clip(ρ_t, 1−ε, 1+ε_high)) − c_H·H_t],
    ρ_t = exp(log π(a_t) − log π_old(a_t)), π_t = softmax(z_t), z_t as in `linear_token_logprobs`

    The same numbers and gradients as `linear_token_logprobs_and_entropy` and `policy_loss` one
    after the other, with three matmuls instead of four: the gradients are formed in the forward
    pass, while a chunk's logits are there, and kept until the backward pass, which multiplies
    them by the incoming gradient. Under `no_grad` there is one matmul.

    Args:
        hidden: [..., D], floating: h_t, the last hidden state that predicts token t.
        weight: [V, D], the dtype of hidden, any strides: the LM head. Slice off padding rows.
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        old_logprobs: [...], floating: log π_old(a_t) under the policy of the rollout.
        advantages: [...], floating: Â_t.
        weights: [...]. bool: True = the token counts, w = 1/count of this call. Floating: w
            itself, as from `token_weights`; 0 = the token does not count.
        bias: [V]. None: none.
        temperature: τ > 0.
        logit_scale: s > 0.
        logit_softcap: cap > 0. None: none.
        entropy_coef: c_H, the weight of the entropy bonus.
        cliprange: ε in (0, 1).
        cliprange_high: ε_high > 0. None: ε.
        dual_clip: c > 1, as in `policy_loss`. None: no dual clip.
        chunk_bytes: Size of a chunk of logits; None as in `linear_token_logprobs`.
        impl: "auto", "triton", "torch" or "reference" (full logits).

    Returns:
        LinearPPOLoss of 0-dim tensors, float32 (float64 for float64 hidden). `loss` is
        differentiable once, in hidden, weight and bias; `policy` (a `PolicyLoss`, its loss without
        the bonus), `entropy` (mean of H over tokens that count) and `ratio_max` (their largest ρ)
        are detached. Positions that do not count have no effect, whatever they hold, and a
        gradient of exactly 0.

    Raises:
        ValueError: A shape, a device or a number is wrong; a token that counts is not in [0, V)
            (looked at on the CPU only).
        TypeError: A dtype is wrong.

    Source: Schulman et al. 2017, eq. 7 and 9, https://arxiv.org/abs/1707.06347.
    """
    per_token = {"tokens": tokens, "old_logprobs": old_logprobs, "advantages": advantages}
    settings = check_linear(
        hidden, weight, bias, temperature, logit_scale, logit_softcap, chunk_bytes,
        **per_token, weights=weights,
    )  # fmt: skip
    check_clip(cliprange, cliprange_high, dual_clip)
    check_finite(entropy_coef=entropy_coef)
    check_floating(old_logprobs=old_logprobs, advantages=advantages)
    check_weights(weights)
    check_tokens(tokens, len(weight), weights != 0)
    chosen = resolve_impl(impl, hidden, weight)
    if chosen is Impl.REFERENCE:
        return reference.linear_ppo_loss(
            hidden, weight, tokens, old_logprobs, advantages, weights, bias=bias,
            temperature=temperature, logit_scale=logit_scale, logit_softcap=logit_softcap,
            entropy_coef=entropy_coef, cliprange=cliprange, cliprange_high=cliprange_high,
            dual_clip=dual_clip,
        )  # fmt: skip
    weights = torch.where(tokens != IGNORE_INDEX, weights, 0).to(weights.dtype)
    tokens = ignore(tokens, weights != 0)
    wide = torch.float64 if settings.dtype == torch.float64 else torch.float32
    constants = (
        x.detach().flatten() for x in (old_logprobs.to(wide), advantages.to(wide), weights)
    )
    trained = torch.is_grad_enabled()
    loss, numbers, *_ = ppo.linear_ppo_loss(
        flat_hidden(hidden), weight, bias, tokens.flatten(), *constants, *settings,
        cliprange, cliprange if cliprange_high is None else cliprange_high, dual_clip,
        entropy_coef, chosen.value,
        *(trained and x is not None and x.requires_grad for x in (hidden, weight, bias)),
    )  # fmt: skip
    *policy, entropy, ratio_max, _ = numbers.unbind()
    return LinearPPOLoss(loss, PolicyLoss(*policy), entropy, ratio_max)
