"""The named tuples that operators return; every number in them is a 0-dim tensor or [B, T]."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenStatistics(NamedTuple):
    """log π(a), H(π), KL(π‖π_ref) and log π_ref(a) per token; the last has no gradient."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    ref_logprobs: Tensor


class PolicyLoss(NamedTuple):
    """The clipped policy loss, and plain means over the `count` tokens that count (detached)."""

    loss: Tensor
    clipfrac: Tensor
    approx_kl: Tensor
    ratio_mean: Tensor
    ratio_var: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody calls here


class ValueLoss(NamedTuple):
    """The clipped value loss, and the share of the `count` tokens where the clip binds."""

    loss: Tensor
    clipfrac: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody calls here


class PPOLoss(NamedTuple):
    """policy.loss + vf_coef·value.loss; only `loss` itself carries a gradient."""

    loss: Tensor
    policy: PolicyLoss
    value: ValueLoss


class LinearPPOLoss(NamedTuple):
    """policy.loss − entropy_coef·Σ w·H; only `loss` carries a gradient; entropy: token mean.

    ratio_max: the largest ρ of the tokens that count, at most e^40; 0 where none does.
    """

    loss: Tensor
    policy: PolicyLoss
    entropy: Tensor
    ratio_max: Tensor


class PPOAdvantages(NamedTuple):
    """Advantages (not whitened), returns, and the moments [3] that whitening needs."""

    advantages: Tensor
    returns: Tensor
    moments: Tensor
