"""The four models: loading them, and the checks that they fit together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ppo.config import Config, InputError
from ppo.policy import Policy

VALUE_HEAD = "value_head.safetensors"


class Critic(nn.Module):
    """A decoder with a scalar head: V(s_t) for every position."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the values, [B,L] fp32."""
        hidden = self.trunk(**inputs).last_hidden_state
        values: Tensor = self.head(hidden).squeeze(-1).float()
        return values

    def save_pretrained(self, folder: Path) -> None:
        """Write the trunk as an ordinary model folder, and the head beside it."""
        self.trunk.save_pretrained(folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in self.head.state_dict().items()},
            folder / VALUE_HEAD,
        )


@dataclass(frozen=True)
class Models:
    """Actor and critic train; reference and reward model are frozen. GAE alone needs the critic."""

    actor: Policy
    critic: Critic | None
    ref: Policy
    reward_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase
    critic_source: str | None

    @property
    def reward_shares_tokenizer(self) -> bool:
        """Whether the reward model can read the actor's token ids as they are."""
        return bool(self.tokenizer.get_vocab() == self.reward_tokenizer.get_vocab())

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
    """Load the four models and check that they fit together, before any work is done."""
    assert config.actor is not None
    assert config.reward_model is not None
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    ref_source = config.ref or config.actor
    configs = {
        key: _read_config(key, source)
        for key, source in (
            ("actor", config.actor),
            ("ref", ref_source),
            ("reward_model", config.reward_model),
        )
    }
    tokenizer = _load_tokenizer("actor", config.actor)
    reward_tokenizer = _load_tokenizer("reward_model", config.reward_model)
    _check_vocabulary(config, configs, tokenizer)
    _check_reward_head(config.reward_model, configs["reward_model"])
    critic_source = None
    if config.ppo.advantage_estimator == "gae":
        critic_source = config.critic or _default_critic(
            config, configs, tokenizer, reward_tokenizer
        )
    dtype = getattr(torch, config.dtype)
    models = Models(
        actor=Policy(_load(AutoModelForCausalLM, "actor", config.actor, dtype=dtype)),
        critic=load_critic(critic_source, dtype) if critic_source else None,
        ref=Policy(_load(AutoModelForCausalLM, "ref", ref_source, dtype=dtype)).requires_grad_(
            False
        ),
        reward_model=_load(
            AutoModelForSequenceClassification, "reward_model", config.reward_model, dtype=dtype
        ).requires_grad_(False),
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        critic_source=critic_source,
    )
    if not models.eos_ids:
        raise InputError(f"actor: {config.actor} names no EOS token, so no response could ever end")
    return models


def load_critic(source: str, dtype: torch.dtype) -> Critic:
    """Build a critic from a model folder: its trunk, and its scalar head where it has one.

    A causal LM has none: its head starts at N(0, 1/(D+1)) with bias 0 (Stiennon et al. 2020).
    """
    architecture = (_read_config("critic", source).architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        full = _load(AutoModelForSequenceClassification, "critic", source, dtype=dtype)
    elif architecture.endswith("ForTokenClassification"):
        full = _load(AutoModelForTokenClassification, "critic", source, dtype=dtype)
    else:
        full = None
    trunk = full.base_model if full is not None else _load(AutoModel, "critic", source, dtype=dtype)
    head = nn.Linear(trunk.config.get_text_config().hidden_size, 1).to(dtype)
    nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    nn.init.zeros_(head.bias)
    saved_head = Path(source) / VALUE_HEAD
    if saved_head.is_file():
        head.load_state_dict(load_file(saved_head))
    elif full is not None:
        _copy_head(full, head, source)
    return Critic(trunk, head)


def _copy_head(full: PreTrainedModel, head: nn.Linear, source: str) -> None:
    own = getattr(full, "score", None) or getattr(full, "classifier", None)
    if not isinstance(own, nn.Linear) or own.weight.shape != head.weight.shape:
        raise InputError(f"critic: {source} has no scalar head that could start the value function")
    with torch.no_grad():
        head.weight.copy_(own.weight)
        if own.bias is not None:
            head.bias.copy_(own.bias)


def _default_critic(
    config: Config,
    configs: dict[str, PretrainedConfig],
    tokenizer: PreTrainedTokenizerBase,
    reward_tokenizer: PreTrainedTokenizerBase,
) -> str:
    """The reward model where tokens and architecture are the actor's, else the actor."""
    same_family = configs["actor"].model_type == configs["reward_model"].model_type
    same_tokens = tokenizer.get_vocab() == reward_tokenizer.get_vocab()
    source = config.reward_model if same_family and same_tokens else config.actor
    assert source is not None
    return source


def _read_config(key: str, source: str) -> PretrainedConfig:
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"{key}: {source} is not a model folder (it has no config.json)")
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise InputError(f"{key}: no such folder: {source}")
    if folder.is_file():
        raise InputError(f"{key}: {source} is a file, expected a model folder or a hub id")
    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(source)
        return loaded
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise InputError(f"{key}: cannot load {source!r}: {_first_line(error)}") from None


def _load(auto: Any, key: str, source: str, **kwargs: Any) -> Any:
    try:
        return auto.from_pretrained(source, **kwargs).eval()  # eval: PPO runs without dropout
    except Exception as error:
        raise InputError(f"{key}: cannot load {source!r}: {_first_line(error)}") from error


def _load_tokenizer(key: str, source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise InputError(f"{key}: no tokenizer in {source!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
