"""What a person is told of a run: who is who, and what is unusual."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ppo.config import Config
from ppo.data import EncodedPrompts
from ppo.models import Models
from ppo.report import ModelRow
from ppo.rollout import sampling_warning
from ppo.trainer import Trainer


def model_rows(config: Config, models: Models) -> list[ModelRow]:
    """Who is who: role, source, architecture, size, and whether it trains."""
    actor, shares = models.actor.model, config.models.sharing
    rows = [ModelRow("actor", str(config.actor), type(actor).__name__, count(actor), True)]
    if models.critic is not None and shares == "separate":
        critic = models.critic
        name = type(critic.trunk).__name__
        rows.append(ModelRow("critic", str(models.critic_source), name, count(critic), True))
    elif models.value_head is not None:
        trained = models.critic.trained() if models.critic else models.value_head.parameters()
        source = "adapter on the actor's base" if models.critic else "head on the actor"
        size = sum(parameter.numel() for parameter in trained)
        rows.append(ModelRow("critic", source, "Linear", size, True))
    if shares == "lora":
        rows.append(ModelRow("reference", "the actor's base, adapters off", "", 0, False))
    else:
        ref = models.ref.model
        rows.append(ModelRow("reference", str(config.ref), type(ref).__name__, count(ref), False))
    if models.reward_model is not None:
        name = type(models.reward_model).__name__
        size = count(models.reward_model)
        rows.append(ModelRow("reward model", str(config.reward_model), name, size, False))
    return rows


def count(model: nn.Module) -> int:
    """Parameters, those that are shared once."""
    return sum(parameter.numel() for parameter in model.parameters())


def start_notes(trainer: Trainer, prompts: EncodedPrompts) -> Iterator[str]:
    """What a person should know before the first step."""
    config, models = trainer.config, trainer.models
    for role, policy in (("actor", models.actor), ("reference", models.ref)):
        if policy.why_logits:
            yield f"{role}: logits are made in full, because {policy.why_logits}"
    limit = config.rollout.max_prompt_tokens
    if prompts.dropped:
        yield (
            f"{prompts.dropped} prompts left out: longer than {limit} tokens "
            "(rollout.max_prompt_tokens)"
        )
    if prompts.truncated:
        yield (
            f"{prompts.truncated} prompts cut to their last {limit} tokens "
            "(rollout.long_prompts truncate)"
        )
    if config.dtype == "bfloat16" and config.models.sharing != "lora":
        yield (
            "dtype bfloat16: the trained weights have 8 bits of precision, and an update of less "
            "than about 1/500 of a weight is lost; float32, or models.sharing lora, keeps it"
        )
    warning = sampling_warning(trainer.sampling)
    if warning:
        yield warning


def step_notes(config: Config, step: int, metrics: dict[str, float]) -> Iterator[str]:
    """What a person should know of this step."""
    taken, skipped = int(metrics["policy/updates"]), int(metrics["policy/skipped"])
    if skipped:
        yield f"step {step}: {skipped} updates left out, their gradients were not finite"
    if taken + skipped < config.updates_per_step:
        epoch = taken // config.ppo.num_minibatches + 1
        yield (
            f"step {step}: updates stopped in epoch {epoch} after {taken} steps, "
            f"approx_kl passed {config.ppo.target_kl} (ppo.target_kl)"
        )
