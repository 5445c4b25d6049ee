"""What the policy's loss is made of, beside log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """What the policy's loss needs beside the log-probabilities: see `policy_loss`.

    With `ref_logprobs` the KL to the reference is part of it: kl_coef·Σ w_t·ρ_t·Δ_t.
    """

    old_logprobs: Tensor  # [B,T], as the next two
    advantages: Tensor
    weights: Tensor
    cliprange: float
    cliprange_high: float | None
    dual_clip: float | None
    entropy_coef: float
    ref_logprobs: Tensor | None = None  # [B,T]
    kl_coef: float = 0.0

    @property
    def clipped(self) -> dict[str, Any]:
        """The arguments of `policy_loss`."""
        rest = ("entropy_coef", "ref_logprobs", "kl_coef")
        return {name: value for name, value in vars(self).items() if name not in rest}


def kl_term(logprobs: Tensor, objective: Objective) -> Tensor:
    """Return Σ w_t·ρ_t·Δ_t with the gradient Σ w_t·ρ_t·Δ_t·∇log π(a_t|s_t).

    Δ = log π − log π_ref and ρ = π/π_old. In expectation over tokens of the old policy the value is
    Σ w·KL(π‖π_ref) and the gradient is its gradient: E[ρ·∇log π] = 0 is left out, which takes
    variance away. Differentiating k1 or k3 themselves would give another gradient (0 for k1).

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html, for the estimators; the gradient
    is the score-function one of Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    assert objective.ref_logprobs is not None
    counts = objective.weights != 0
    # ends at e^40, as the ratio in `policy_loss`
    log_ratio = (logprobs - objective.old_logprobs).detach().clamp(max=40.0)
    charge = log_ratio.exp() * (logprobs.detach() - objective.ref_logprobs)
    charge = (objective.weights * charge).masked_fill(~counts, 0.0)
    through = (logprobs - logprobs.detach()).masked_fill(~counts, 0.0)
    return charge.sum() + (charge * through).sum()
