"""Scores of whole responses: the reward model, reward functions, and how they are shaped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ppo.batch import Rollout, join, split
from ppo.config import Config, InputError
from ppo.data import EncodedPrompts
from ppo.models import Models
from ppo.report import Sample
from ppo.reward_shaping import (
    RunningScores,
    SourceScores,
    clip_scores,
    combine_scores,
    penalise_length,
    penalise_missing_eos,
    read_scores,
    score_moments,
)
from ppo.reward_sources import RewardFunction
from ppo.rewards import score_texts, score_tokens
from ppo.sections import PPOConfig

MODEL = "model"
"""Name of the reward model among the rewards."""


class Scored(NamedTuple):
    """What the reward sources say of a batch."""

    scores: Tensor  # [B], the weighted sum
    means: dict[str, float]
    """Mean of each source over the samples that it applies to."""
    samples: list[Sample]


def score(
    config: Config,
    models: Models,
    functions: Mapping[str, RewardFunction],
    rollout: Rollout,
    prompts: EncodedPrompts,
) -> Scored:
    """Ask every reward source for each response, and add up their scores with their weights.

    Raises:
        InputError: a source fails, gives too few scores, or one that is not finite.
    """
    texts = _decode(models, rollout.prompts, rollout.prompt_mask)
    responses = _decode(models, rollout.responses, rollout.response_mask)
    sources: dict[str, SourceScores] = {}
    weights: dict[str, float] = {}
    try:
        if models.reward_model is not None:
            figures = _ask_model(config, models, rollout, prompts, texts, responses)
            sources[MODEL] = read_scores(figures, MODEL, len(texts))
            weights[MODEL] = config.reward_model_weight
        for name, function in functions.items():
            sources[name] = function(texts, responses, prompts.columns)
            weights[name] = function.weight
        scores = combine_scores(sources, weights)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(error) from error
    return Scored(
        scores.to(rollout.responses.device),
        {name: _applicable_mean(source) for name, source in sources.items()},
        [Sample(*row) for row in zip(texts, responses, scores.tolist(), strict=True)],
    )


def _decode(models: Models, rows: Tensor, mask: Tensor) -> list[str]:
    """Texts of the tokens that count."""
    return [
        str(models.tokenizer.decode(row[keep], skip_special_tokens=True))
        for row, keep in zip(rows, mask, strict=True)
    ]


def _ask_model(
    config: Config,
    models: Models,
    rollout: Rollout,
    prompts: EncodedPrompts,
    texts: list[str],
    responses: list[str],
) -> Tensor:
    model, tokenizer = models.reward_model, models.reward_tokenizer
    assert model is not None
    assert tokenizer is not None
    size, tokens = config.ppo.micro_batch_size, config.ppo.micro_batch_tokens
    if models.reward_shares_tokenizer:
        return join(
            [
                (rows, score_tokens(model, part.sequences, part.attention_mask))
                for rows, part in split(rollout, size, tokens)
            ]
        )
    if tokens is not None:
        size = tokens // config.rollout.longest
    return score_texts(
        model,
        tokenizer,
        texts,
        responses,
        messages=[None if isinstance(each, str) else each for each in prompts.contents],
        finished=rollout.finished.tolist(),
        batch_size=size,
    )


def _applicable_mean(source: SourceScores) -> float:
    applicable = source.scores[source.applies]
    return float(applicable.mean()) if len(applicable) else math.nan


def shape_scores(
    ppo: PPOConfig, scores: Tensor, rollout: Rollout, seen: RunningScores
) -> tuple[Tensor, RunningScores]:
    """The scores that PPO is given, [B]: clip, length, normalisation, missing EOS.

    Args:
        ppo: the settings.
        scores: [B], as the reward sources gave them.
        rollout: their responses.
        seen: the scores of earlier rollouts, after clip and length penalty.

    Returns:
        The shaped scores, and `seen` with this rollout's where `score_normalization` is running.
    """
    if ppo.score_clip is not None:
        scores = clip_scores(scores, ppo.score_clip)
    scores = penalise_length(scores, rollout.response_mask.sum(1), ppo.length_penalty_alpha)
    if ppo.score_normalization != "none":
        before = seen if ppo.score_normalization == "running" else RunningScores()
        seen = before.updated(score_moments(scores))
        scores = seen.normalised(scores)
    return penalise_missing_eos(scores, rollout.finished, ppo.missing_eos_penalty), seen
