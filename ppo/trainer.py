"""What a run holds: models, learners, and the numbers that move from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from ppo.adapters import activate
from ppo.batch import Rollout
from ppo.config import Config
from ppo.data import EncodedPrompts, left_pad
from ppo.kl_control import KLController
from ppo.learner import Learner, make_learner
from ppo.look import Look, centre_values, look
from ppo.models import Models
from ppo.ptx import Examples, read_examples
from ppo.report import Sample
from ppo.reward_shaping import RunningScores
from ppo.reward_sources import RewardFunction, load_reward_functions
from ppo.rewards import Judge, load_function
from ppo.rollout import Sampling, generate
from ppo.scoring import Scored, score, shape_scores
from ppo.update import Extras


@dataclass
class State:
    """What a step leaves for the next one, beside the models and their optimisers."""

    kl: KLController
    scores: RunningScores = field(default_factory=RunningScores)
    rollouts: int = 0


@dataclass(frozen=True)
class Trainer:
    """What every step needs: the settings, the models, and what moves from step to step."""

    config: Config
    models: Models
    actor: Learner
    critic: Learner | None
    accelerator: Accelerator
    generator: torch.Generator
    sampling: Sampling
    rewards: Mapping[str, RewardFunction]
    examples: Examples | None
    judge: Judge | None
    state: State

    @property
    def train_actor(self) -> bool:
        """False while the critic alone learns."""
        return self.state.rollouts >= self.config.ppo.critic_warmup_steps

    def rollout(self, prompts: EncodedPrompts) -> Rollout:
        """Sample a response for each prompt."""
        ids, mask = left_pad(prompts.rows, self.models.pad_id)
        activate(self.models.actor.model, self.models.actor.adapter)
        device = self.accelerator.device
        return generate(
            self.models.actor.model,
            ids.to(device),
            mask.to(device),
            self.sampling,
            self.models.tokenizer,
        )

    def scores(self, rollout: Rollout, prompts: EncodedPrompts) -> Scored:
        """What the reward sources say of each response, and the texts that they read."""
        return score(self.config, self.models, self.rewards, rollout, prompts)

    def shape(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """The scores that PPO is given, [B]; running figures move on."""
        shaped, self.state.scores = shape_scores(
            self.config.ppo, scores, rollout, self.state.scores
        )
        return shaped

    def look(self, rollout: Rollout, scores: Tensor) -> Look:
        """What actor, reference and critic see; the first look may centre the values."""
        seen = look(self.config, self.actor, self.critic, self.models.ref, rollout)
        head = self.models.value_head
        centre = self.config.ppo.critic_bias_from_scores and self.state.rollouts == 0
        if head is not None and centre:
            return centre_values(seen, head, scores, rollout.response_mask)
        return seen

    def bootstrap_values(self, look: Look, rollout: Rollout) -> Tensor | None:
        """V after a response that the length limit cut, 0 after one that ended; None: 0 for all."""
        if not self.config.ppo.bootstrap_truncated or look.last_values is None:
            return None
        return look.last_values.masked_fill(rollout.finished, 0.0)

    def extras(self, kl_coef: float) -> Extras:
        """The parts of the loss beyond clipped policy and value loss."""
        ppo, examples = self.config.ppo, self.examples
        charged = ppo.kl_in_loss and kl_coef != 0

        def supervised(responses: int) -> Tensor:
            assert examples is not None
            return examples.loss(
                self.actor.model,
                responses,
                coef=ppo.ptx_coef,
                fraction=ppo.ptx_fraction,
                impl=self.config.impl,
            )

        return Extras(
            kl_coef=kl_coef if charged else 0.0,
            reference=self.models.ref if charged and ppo.kl_estimator == "exact" else None,
            supervised=supervised if examples is not None else None,
        )


def prepare(config: Config, models: Models) -> Trainer:
    """Put the models on the device and give actor and critic their optimisers."""
    accelerator = Accelerator()
    for frozen in filter(None, (models.ref, models.reward_model)):
        frozen.to(accelerator.device)
    actor, critic = _learners(config, models, accelerator)
    limits = models.actor.model.config.get_text_config()
    return Trainer(
        config=config,
        models=models,
        actor=actor,
        critic=critic,
        accelerator=accelerator,
        generator=torch.Generator().manual_seed(config.seed),
        sampling=make_sampling(config, models),
        rewards=load_reward_functions(
            config.reward_functions, timeout=config.reward_timeout, retries=config.reward_retries
        ),
        examples=read_examples(
            config.ptx_data,
            models.tokenizer,
            longest=getattr(limits, "max_position_embeddings", None),
            system_prompt=config.system_prompt,
            pad_id=models.pad_id,
            seed=config.seed,
        )
        if config.ptx_data
        else None,
        judge=load_function(config.judge, "judge") if config.judge else None,
        state=State(
            kl=KLController(
                kl_coef=config.ppo.kl_coef,
                kind=config.ppo.kl_controller,
                target=config.ppo.kl_target,
                horizon=config.ppo.kl_horizon,
            ),
        ),
    )


def make_sampling(config: Config, models: Models) -> Sampling:
    """How responses are sampled."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        eos_ids=tuple(models.eos_ids),
        pad_id=models.pad_id,
        stop_strings=rollout.stop_strings,
    )


def _learners(
    config: Config, models: Models, accelerator: Accelerator
) -> tuple[Learner, Learner | None]:
    optim = config.optim
    actor = accelerator.prepare(models.actor)
    warmup = config.ppo.critic_warmup_steps * config.updates_per_step
    actor_steps = config.optimizer_steps - warmup
    learner = make_learner(actor, models.actor.trained(), optim.actor_lr, optim, actor_steps)
    if models.critic is not None:
        critic = accelerator.prepare(models.critic)
        parameters = models.critic.trained()
    elif models.actor.value_head is not None:
        critic, parameters = actor, list(models.actor.value_head.parameters())
    else:
        return learner, None
    return learner, make_learner(
        critic,
        parameters,
        optim.critic_lr,
        optim,
        config.optimizer_steps,
        on_actor=models.critic is None,
    )


def evaluate(
    trainer: Trainer, prompts: EncodedPrompts | None
) -> tuple[dict[str, float], list[Sample]]:
    """Sample held-out prompts and measure them; the training randomness is left as it was."""
    if not prompts:
        return {}, []
    with torch.random.fork_rng():
        torch.manual_seed(trainer.config.seed)
        scored = trainer.scores(trainer.rollout(prompts), prompts)
    figures = {"score": float(scored.scores.mean()), **judge_metrics(trainer.judge, scored.samples)}
    return figures, scored.samples


def judge_metrics(judge: Judge | None, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of a judge that the policy never sees: it measures, it does not train."""
    if judge is None:
        return {}
    figures = judge([sample.prompt for sample in samples], [sample.response for sample in samples])
    return {"objective/judge": sum(figures) / len(figures)}
