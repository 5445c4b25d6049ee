"""From what the reward sources say of whole responses to the scores that PPO is given.

The order: `read_scores` of each source, `combine_scores`, `clip_scores`, `penalise_length`,
`RunningScores`, `penalise_missing_eos`. The clip sees the raw score, before any baseline; the
length penalty needs the sign that the source gave; the last one is in the units that PPO sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels import combine_moments, masked_moments, whiten


class SourceScores(NamedTuple):
    """What one reward source says of a batch."""

    scores: Tensor  # [B] fp32, 0 where the source does not apply
    applies: Tensor  # [B] bool, False = the source said None


def check_scores(scores: Tensor, name: str) -> None:
    """Refuse NaN and infinities, [B], and name the first sample that has one."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"{name} must be finite, got {float(scores[index])} for sample {index} of the batch"
        )


def read_scores(figures: Sequence[float | None] | Tensor, name: str, count: int) -> SourceScores:
    """Check what the reward source of this name returned for `count` samples; the CPU holds it.

    Args:
        figures: one number for each sample, or None where the source does not apply.
        name: the reward's name, for the messages.
        count: B, samples of the batch.

    Raises:
        ValueError: the number of figures is not `count`, or one is NaN, infinite or past float32.
        TypeError: a figure is neither a number nor None.
    """
    if isinstance(figures, Tensor):
        figures = figures.tolist()
    if len(figures) != count:
        raise ValueError(f"reward {name!r} must give {count} scores, got {len(figures)}")
    for index, figure in enumerate(figures):
        # float() below would take a text such as "0.5"
        if figure is not None and not hasattr(figure, "__float__"):
            raise TypeError(
                f"reward {name!r} must be a number or None, got {type(figure).__name__} "
                f"for sample {index} of the batch"
            )
    scores = torch.tensor(
        [0.0 if figure is None else float(figure) for figure in figures], dtype=torch.float32
    )
    check_scores(scores, f"reward {name!r}")
    applies = torch.tensor([figure is not None for figure in figures], dtype=torch.bool)
    return SourceScores(scores, applies)


def combine_scores(sources: Mapping[str, SourceScores], weights: Mapping[str, float]) -> Tensor:
    """Add up the rewards with their weights.

    s = Σ_k w_k·a_k·s_k,  a_k = 1 where source k applies to the sample, else 0

    A source that does not apply drops out; the other weights stay as they are. (Dividing by the
    weights left would let a sample's score depend on what was *not* asked of it, and fails where
    a penalty has a negative weight.)

    Args:
        sources: by name; each [B].
        weights: w_k by the same names, finite.

    Returns:
        [B] fp32.

    Raises:
        ValueError: the names differ, a weight is not finite, there is no source, or a sample to
            which none of them applies.
    """
    if not sources:
        raise ValueError("sources must hold at least one reward, got none")
    if sources.keys() != weights.keys():
        raise ValueError(f"weights must name the rewards {list(sources)}, got {list(weights)}")
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"weight of reward {name!r} must be finite, got {weight}")
    applies = torch.stack([source.applies for source in sources.values()]).any(0)
    if not applies.all():
        index = int((~applies).nonzero()[0])
        raise ValueError(
            f"no reward applies to sample {index} of the batch: {', '.join(sources)} gave None"
        )
    parts = [weights[name] * source.scores for name, source in sources.items()]
    return torch.stack(parts).sum(0)


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Clip to [−limit, limit], limit > 0.

    Raises:
        ValueError: `limit` is not positive and finite.
    """
    if not 0 < limit < math.inf:
        raise ValueError(f"limit must be positive and finite, got {limit}")
    return scores.clamp(-limit, limit)


def penalise_length(scores: Tensor, lengths: Tensor, alpha: float = 0.5) -> Tensor:
    """Take from each score the share of its size that grows with the length.

    s' = s − |s|·(1 − L^(−α)),  which is s / L^α for s ≥ 0 and s·(2 − L^(−α)) for s < 0

    s / L^α alone would bring a negative score nearer to 0, so that rambling pays. Here both signs
    lose the same: s' falls with L for any s ≠ 0, rises with s at any L, keeps the sign, and is at
    most twice as bad. A score of 0 has nothing to lose.

    Args:
        scores: [B] floating, s.
        lengths: [B] integers, L: tokens of the response that count; an empty one is as long as 1.
        alpha: α ≥ 0, finite; 0 is off.

    Raises:
        ValueError: shapes differ, or `alpha` is negative or not finite.
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be finite and not negative, got {alpha}")
    if lengths.shape != scores.shape:
        raise ValueError(
            f"lengths must have shape {list(scores.shape)} (as scores), got {list(lengths.shape)}"
        )
    kept = lengths.clamp(min=1).to(scores.dtype) ** -alpha
    return scores - scores.abs() * (1 - kept)


def penalise_missing_eos(scores: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """Subtract a penalty from responses without an EOS of their own.

    s' = s − p·[not finished].  It lowers a negative score as well, which a factor would raise.

    Args:
        scores: [B] floating.
        finished: [B] bool, True = the response ends with an EOS, be it at the last allowed token.
        penalty: p ≥ 0, finite.

    Raises:
        ValueError: shapes differ, or `penalty` is negative or not finite.
        TypeError: `finished` is not bool.

    Source: Ziegler et al. 2019 (a fixed low score there), https://arxiv.org/abs/1909.08593;
    subtracted as in TRL.
    """
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty must be finite and not negative, got {penalty}")
    if finished.dtype != torch.bool:
        raise TypeError(f"finished must be bool (True = ended with EOS), got {finished.dtype}")
    if finished.shape != scores.shape:
        raise ValueError(
            f"finished must have shape {list(scores.shape)} (as scores), got {list(finished.shape)}"
        )
    return scores - penalty * ~finished


def score_moments(scores: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of this rank's scores: [3] fp32 on its device.

    Summed in float64 (on the CPU, as MPS has none), so that equal scores have exactly their mean.
    """
    exact = scores.detach().cpu().double()
    moments = masked_moments(exact, torch.ones_like(exact, dtype=torch.bool))
    return moments.float().to(scores.device)


@dataclass(frozen=True)
class RunningScores:
    """Mean and variance of every score seen so far; three numbers that a checkpoint keeps.

    s' = (s − μ)/sqrt(σ² + ε),  σ² = M₂/max(n − 1, 1): the sample variance, as `whiten` takes it

    The batch at hand is added first (`running = running.updated(...)`), then normalised; so the
    first batch is its own measure, and a held-out batch is normalised without being added.
    `RunningScores().updated(...)`, not kept, is whitening by batch. The first score of all, and
    equal scores, come out 0.

    Source: Chan, Golub & LeVeque 1979 (Welford 1962 for batches),
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def updated(self, moments: Tensor) -> RunningScores:
        """Add [3] from `score_moments`, or [R, 3]: one row per rank, alike on all ranks.

        Raises:
            ValueError: a moment is NaN or infinite, which no later score would wash out.
        """
        seen = torch.tensor([[self.count, self.mean, self.m2]], dtype=torch.float64)
        parts = moments.detach().cpu().double().reshape(-1, 3)
        if not parts.isfinite().all():
            raise ValueError(f"moments must be finite, got {parts.tolist()}")
        return RunningScores(*combine_moments(torch.cat([seen, parts])).tolist())

    def normalised(self, scores: Tensor) -> Tensor:
        """Scale [B] scores by what was seen so far.

        Raises:
            ValueError: nothing was: there is no scale to divide by.
        """
        if not self.count:
            raise ValueError("scores cannot be normalised before `updated` has seen some")
        moments = torch.tensor([self.count, self.mean, self.m2], device=scores.device)
        return whiten(scores, torch.ones_like(scores, dtype=torch.bool), moments=moments)
