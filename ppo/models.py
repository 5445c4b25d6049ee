"""The four models: loading them, and the checks that they fit together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ppo.adapters import (
    ACTOR,
    CRITIC,
    REFERENCE,
    add_adapters,
    base_of_adapter,
    load_adapters,
    merged,
)
from ppo.config import Config, InputError
from ppo.critic import Critic, load_critic, load_head, new_head
from ppo.heads import decoder
from ppo.model_folders import load_model, load_tokenizer, read_config
from ppo.policy import Policy
from ppo.recompute import recompute_layers


@dataclass(frozen=True)
class Models:
    """Actor and critic train; reference and reward model are frozen. GAE alone needs values.

    With `models.sharing: trunk` the values come from the actor's `value_head` and `critic` is None.
    """

    actor: Policy
    critic: Critic | None
    ref: Policy
    reward_model: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase | None
    critic_source: str | None

    @property
    def value_head(self) -> nn.Linear | None:
        """The linear layer that gives the values, wherever it is."""
        return self.critic.head if self.critic else self.actor.value_head

    @property
    def reward_shares_tokenizer(self) -> bool:
        """Whether the reward model can read the actor's token ids as they are."""
        reader = self.reward_tokenizer
        return reader is not None and bool(self.tokenizer.get_vocab() == reader.get_vocab())

    @property
    def pad_id(self) -> int:
        """The id that fills rows; masked everywhere, so any id of the vocabulary would do."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.eos_ids[0])

    @property
    def eos_ids(self) -> list[int]:
        """Every id that ends a response: the tokenizer's and the model's own list."""
        sampling = self.actor.model.generation_config
        own = sampling.eos_token_id if sampling else None
        ids = [self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
        return sorted({int(id_) for id_ in ids if id_ is not None})


def load_models(config: Config) -> Models:
    """Load the models and check that they fit together, before any work is done."""
    assert config.actor is not None
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    actor_base = base_of_adapter(config.actor) or config.actor
    ref_source = config.ref or actor_base
    sources = {"actor": actor_base, "ref": ref_source, "reward_model": config.reward_model}
    configs = {key: read_config(key, source) for key, source in sources.items() if source}
    tokenizer = load_tokenizer("actor", config.actor)
    _check_vocabulary(config, configs, tokenizer)
    dtype = getattr(torch, config.dtype)
    reward_model, reward_tokenizer = None, None
    if config.reward_model:
        reward_tokenizer = load_tokenizer("reward_model", config.reward_model)
        _check_reward_head(config.reward_model, configs["reward_model"])
        reward_model = load_model(
            AutoModelForSequenceClassification, "reward_model", config.reward_model, dtype=dtype
        ).requires_grad_(False)
    critic_source = config.critic
    if config.needs_critic and not critic_source and config.models.sharing == "separate":
        critic_source = _default_critic(config, configs, tokenizer, reward_tokenizer)
    roles = _load_shared if config.models.sharing == "lora" else _load_apart
    actor, critic, ref = roles(config, ref_source, critic_source, dtype)
    _save_memory(config, actor, critic, ref)
    models = Models(actor, critic, ref, reward_model, tokenizer, reward_tokenizer, critic_source)
    if not models.eos_ids:
        raise InputError(f"actor: {config.actor} names no EOS token, so no response could ever end")
    return models


Roles: TypeAlias = tuple[Policy, Critic | None, Policy]


def _load_apart(
    config: Config, ref_source: str, critic_source: str | None, dtype: torch.dtype
) -> Roles:
    """A model for each role; with `trunk` the critic is a head on the actor."""
    assert config.actor is not None
    base = base_of_adapter(config.actor)
    model = load_model(AutoModelForCausalLM, "actor", base or config.actor, dtype=dtype)
    if base:
        model = merged(model, config.actor)
    head = None
    if config.needs_critic and config.models.sharing == "trunk":
        head = new_head(model.config, dtype)
        load_head(head, config.actor)
    actor = Policy(model, value_head=head, value_gradient=config.models.value_gradient)
    ref = Policy(load_model(AutoModelForCausalLM, "ref", ref_source, dtype=dtype))
    critic = load_critic(critic_source, dtype) if critic_source and head is None else None
    return actor, critic, ref.requires_grad_(False)


def _load_shared(
    config: Config, ref_source: str, critic_source: str | None, dtype: torch.dtype
) -> Roles:
    """One base for actor, critic and reference: LoRA adapters, and none for the reference."""
    assert config.actor is not None
    source = base_of_adapter(config.actor)
    base = load_model(AutoModelForCausalLM, "actor", source or config.actor, dtype=dtype)
    names = [ACTOR, *([CRITIC] if config.needs_critic else [])]
    if source:
        saved = {ACTOR: config.actor, CRITIC: critic_source}
        folders = {name: Path(folder) for name, folder in saved.items() if folder}
        if folders.keys() != set(names):
            raise InputError("critic: with an adapter as the actor, name the critic's adapter too")
        model = load_adapters(base, folders)
    else:
        lora = config.models
        model = add_adapters(
            base, names, rank=lora.lora_rank, alpha=lora.lora_alpha, targets=lora.lora_targets
        )
    critic = None
    if config.needs_critic:
        head = new_head(base.config, dtype)
        load_head(head, critic_source)
        critic = Critic(decoder(model), head, shared=model)  # type: ignore[arg-type]
    return Policy(model, adapter=ACTOR), critic, Policy(model, adapter=REFERENCE)


def _save_memory(config: Config, actor: Policy, critic: Critic | None, ref: Policy) -> None:
    if config.models.gradient_checkpointing:
        trained = {id(trunk): trunk for trunk in (decoder(actor.model), critic and critic.trunk)}
        for trunk in filter(None, trained.values()):
            try:
                recompute_layers(trunk)
            except ValueError as error:
                raise InputError(f"models.gradient_checkpointing: {error}") from None
    if config.models.packing:
        for role, model in (("actor", actor), ("critic", critic), ("ref", ref)):
            why = model.pack() if model is not None else None
            if why:
                raise InputError(f"models.packing: the {role} cannot do without padding: {why}")


def _default_critic(
    config: Config,
    configs: dict[str, PretrainedConfig],
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase | None,
) -> str:
    """The reward model where tokens and architecture are the actor's, else the actor."""
    assert config.actor is not None
    if reward_tokenizer is None:
        return config.actor
    same_family = configs["actor"].model_type == configs["reward_model"].model_type
    same_tokens = tokenizer.get_vocab() == reward_tokenizer.get_vocab()
    source = config.reward_model if same_family and same_tokens else config.actor
    assert source is not None
    return source


def _check_vocabulary(
    config: Config, configs: dict[str, PretrainedConfig], tokenizer: PreTrainedTokenizerBase
) -> None:
    actor, ref = (configs[key].get_text_config().vocab_size for key in ("actor", "ref"))
    if actor != ref:
        raise InputError(
            f"ref: vocabulary of {ref} tokens ({config.ref}) does not match "
            f"the actor's {actor} ({config.actor})"
        )
    if len(tokenizer) > actor:
        raise InputError(
            f"actor: its tokenizer has {len(tokenizer)} tokens, its model only {actor}"
        )


def _check_reward_head(source: str, reward_config: PretrainedConfig) -> None:
    if reward_config.num_labels != 1:
        raise InputError(
            f"reward_model: {source} has {reward_config.num_labels} labels, expected one score"
        )
