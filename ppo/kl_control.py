"""The coefficient β of the KL penalty, and the rules that move it after each rollout."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Literal

MAX_ERROR = 0.2  # Ziegler et al. 2019 clip the relative error here


@dataclass(frozen=True)
class KLController:
    """Holds β and says what it is after the next rollout.

    - "fixed": β stays.
    - "proportional": e = clip(KL/target − 1, −0.2, 0.2),  β ← β·(1 + e·n/horizon)
    - "ppo_paper": β ← 2·β when KL > 1.5·target,  β ← β/2 when KL < target/1.5

    All of its state is `kl_coef`; the rest comes from the settings. A checkpoint keeps that one
    number, and `dataclasses.replace(controller, kl_coef=saved)` goes on from there.

    Args:
        kl_coef: β ≥ 0, finite; positive where a rule moves it, since 0 times anything is 0.
        kind: the rule.
        target: the KL to hold, > 0, in the unit of the `kl` that `updated` is given.
        horizon: sequences in which the proportional rule corrects an error of 1, > 0.

    Raises:
        ValueError: a number is out of range, or `kind` is unknown.

    Source: "proportional": Ziegler et al. 2019, "Fine-Tuning Language Models from Human
    Preferences", section 2.2, https://arxiv.org/abs/1909.08593, with n/horizon for their gain K_β
    as in their https://github.com/openai/lm-human-preferences. "ppo_paper": Schulman et al. 2017,
    "Proximal Policy Optimization Algorithms", section 4, https://arxiv.org/abs/1707.06347.
    """

    kl_coef: float
    kind: Literal["fixed", "proportional", "ppo_paper"] = "fixed"
    target: float = 6.0
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "proportional", "ppo_paper"):
            raise ValueError(
                f"kind must be 'fixed', 'proportional' or 'ppo_paper', got {self.kind!r}"
            )
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef must be finite and not negative, got {self.kl_coef}")
        if self.kl_coef == 0 and self.kind != "fixed":
            raise ValueError(f"kl_coef must be positive for kind {self.kind!r}, got 0: it stays 0")
        for name, number in (("target", self.target), ("horizon", self.horizon)):
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {number}")

    def updated(self, kl: float, count: int) -> KLController:
        """Return the controller for the next rollout.

        Args:
            kl: mean over the rollout's sequences of the KL that the penalty charges (same
                estimator, summed over the tokens of a sequence), in nats, over all ranks. An
                early stop or a logged KL of another estimator is not it.
            count: n, sequences of this rollout over all ranks; not the number of the step.

        Raises:
            ValueError: `kl` is not finite, `count` is not positive, or the rule could make β
                negative at this count.
        """
        if self.kind == "fixed":
            return self
        if not math.isfinite(kl):
            raise ValueError(f"kl must be finite, got {kl}")
        factor = self._proportional(kl, count) if self.kind == "proportional" else self._paper(kl)
        # an underflow to 0 would never be left again
        return replace(self, kl_coef=max(self.kl_coef * factor, sys.float_info.min))

    def _proportional(self, kl: float, count: int) -> float:
        if count < 1:
            raise ValueError(f"count must be positive, got {count}")
        if MAX_ERROR * count >= self.horizon:
            raise ValueError(
                f"horizon must be greater than {MAX_ERROR:g} x the {count} sequences of a rollout, "
                f"got {self.horizon:g}: kl_coef could turn negative"
            )
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return 1 + error * count / self.horizon

    def _paper(self, kl: float) -> float:
        if kl > 1.5 * self.target:
            return 2.0
        return 0.5 if kl < self.target / 1.5 else 1.0
