"""What a run holds: models, learners, and the numbers that move from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from ppo.batch import Rollout, split
from ppo.config import Config, InputError
from ppo.data import left_pad
from ppo.forward import response_logprobs, response_logprobs_and_entropy, response_values
from ppo.kl_control import KLController
from ppo.models import Models
from ppo.report import Sample
from ppo.reward_shaping import (
    RunningScores,
    check_scores,
    clip_scores,
    penalise_length,
    penalise_missing_eos,
    score_moments,
)
from ppo.rewards import Judge, load_function, score_texts, score_tokens
from ppo.rollout import generate
from ppo.update import Learner, make_learner


class Look(NamedTuple):
    """Log-probs and entropy of the actor, log-probs of the reference, values of the critic."""

    logprobs: Tensor  # [B,T], as all
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor | None


@dataclass
class State:
    """What a step leaves for the next one, beside the models and their optimisers."""

    kl: KLController
    scores: RunningScores


@dataclass(frozen=True)
class Trainer:
    """What every step needs: the settings, the models, and what moves from step to step."""

    config: Config
    models: Models
    actor: Learner
    critic: Learner | None
    accelerator: Accelerator
    generator: torch.Generator
    judge: Judge | None
    state: State

    def decode(self, rows: Tensor, mask: Tensor) -> list[str]:
        """Texts of the tokens that count."""
        return [
            str(self.models.tokenizer.decode(row[keep], skip_special_tokens=True))
            for row, keep in zip(rows, mask, strict=True)
        ]

    def rollout(self, rows: list[list[int]], samples: int = 1) -> Rollout:
        """Sample this many responses for each prompt, those of one prompt side by side."""
        repeated = [row for row in rows for _ in range(samples)]
        prompts, prompt_mask = left_pad(repeated, self.models.pad_id)
        return generate(
            self.models.actor.model,
            prompts.to(self.accelerator.device),
            prompt_mask.to(self.accelerator.device),
            max_new_tokens=self.config.rollout.max_new_tokens,
            temperature=self.config.rollout.temperature,
            eos_ids=self.models.eos_ids,
            pad_id=self.models.pad_id,
        )

    def scores(self, rollout: Rollout) -> tuple[Tensor, list[Sample]]:
        """What the reward model says of each response, [B], and the texts that it read."""
        prompts = self.decode(rollout.prompts, rollout.prompt_mask)
        responses = self.decode(rollout.responses, rollout.response_mask)
        reward_model = self.models.reward_model
        if self.models.reward_shares_tokenizer:
            scores = score_tokens(reward_model, rollout.sequences, rollout.attention_mask)
        else:
            scores = score_texts(reward_model, self.models.reward_tokenizer, prompts, responses)
        samples = map(Sample, prompts, responses, scores.tolist())
        return scores, list(samples)

    def shape(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """The scores that PPO is given, [B]: clip, length, normalisation, missing EOS."""
        ppo = self.config.ppo
        try:
            check_scores(scores, "scores of the reward model")
        except ValueError as error:
            raise InputError(error) from None
        if ppo.score_clip is not None:
            scores = clip_scores(scores, ppo.score_clip)
        scores = penalise_length(scores, rollout.response_mask.sum(1), ppo.length_penalty_alpha)
        if ppo.score_normalization != "none":
            seen = self.state.scores if ppo.score_normalization == "running" else RunningScores()
            self.state.scores = seen.updated(score_moments(scores))
            scores = self.state.scores.normalised(scores)
        return penalise_missing_eos(scores, rollout.finished, ppo.missing_eos_penalty)

    @torch.no_grad()
    def look(self, rollout: Rollout) -> Look:
        """What actor, reference and critic see in the rollout.

        The log-probs come from the forward that trains, not from the sampler's cache, so that the
        first ratio is 1.
        """
        how: dict[str, Any] = {
            "temperature": self.config.rollout.temperature,
            "impl": self.config.impl,
        }
        parts = [
            (
                *response_logprobs_and_entropy(self.actor.model, part, **how),
                response_logprobs(self.models.ref, part, **how),
                response_values(self.critic.model, part) if self.critic else None,
            )
            for _, part in split(rollout, self.config.ppo.micro_batch_size)
        ]
        columns = zip(*parts, strict=True)
        joined = (None if column[0] is None else torch.cat(column) for column in columns)
        return Look(*joined)  # type: ignore[arg-type]  # only values can be None


def prepare(config: Config, models: Models) -> Trainer:
    """Put the models on the device and give actor and critic their optimisers."""
    accelerator = Accelerator()
    for frozen in (models.ref, models.reward_model):
        frozen.to(accelerator.device)
    steps = config.optimizer_steps
    actor = accelerator.prepare(models.actor)
    critic = accelerator.prepare(models.critic) if models.critic else None
    return Trainer(
        config=config,
        models=models,
        actor=make_learner(actor, config.optim.actor_lr, config.optim, steps),
        critic=make_learner(critic, config.optim.critic_lr, config.optim, steps)
        if critic
        else None,
        accelerator=accelerator,
        generator=torch.Generator().manual_seed(config.seed),
        judge=load_function(config.judge, "judge") if config.judge else None,
        state=State(
            kl=KLController(
                kl_coef=config.ppo.kl_coef,
                kind=config.ppo.kl_controller,
                target=config.ppo.kl_target,
                horizon=config.ppo.kl_horizon,
            ),
            scores=RunningScores(),
        ),
    )


def evaluate(trainer: Trainer, rows: list[list[int]]) -> tuple[dict[str, float], list[Sample]]:
    """Sample held-out prompts and measure them; the training randomness is left as it was."""
    if not rows:
        return {}, []
    with torch.random.fork_rng():
        torch.manual_seed(trainer.config.seed)
        scores, samples = trainer.scores(trainer.rollout(rows))
    return {"score": float(scores.mean()), **judge_metrics(trainer.judge, samples)}, samples


def judge_metrics(judge: Judge | None, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of a judge that the policy never sees: it measures, it does not train."""
    if judge is None:
        return {}
    figures = judge([sample.prompt for sample in samples], [sample.response for sample in samples])
    return {"objective/judge": sum(figures) / len(figures)}
