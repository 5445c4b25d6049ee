"""Loading: what fits together loads, what does not is one line that names the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from ppo.config import Config, InputError
from ppo.critic import load_critic
from ppo.models import load_models
from tests.ppo.conftest import llama_config

Save = Callable[..., Path]


@pytest.fixture
def config(folders: dict[str, str]) -> Config:
    return replace(Config(), **folders)


def test_the_defaults_are_the_actor_as_reference_and_the_reward_model_as_critic(
    config: Config,
) -> None:
    models = load_models(config)
    for a, b in zip(models.actor.parameters(), models.ref.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b
    assert models.critic_source == config.reward_model
    assert torch.equal(models.critic.head.weight, models.reward_model.score.weight)
    assert torch.equal(
        models.critic.trunk.embed_tokens.weight, models.reward_model.model.embed_tokens.weight
    )
    trains = [
        any(p.requires_grad for p in model.parameters())
        for model in (models.actor, models.critic, models.ref, models.reward_model)
    ]
    assert trains == [True, True, False, False]
    assert models.eos_ids == [2]
    assert models.reward_shares_tokenizer


def test_the_critic_starts_from_the_actor_where_architectures_differ(
    config: Config, save: Save
) -> None:
    gpt2 = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, num_labels=1)
    )
    config = replace(config, reward_model=str(save(gpt2, "gpt2-reward")))
    models = load_models(config)
    assert models.critic_source == config.actor
    assert models.critic.trunk.config.model_type == "llama"


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_a_saved_critic_loads_with_the_same_values(kind: type, save: Save, tmp_path: Path) -> None:
    torch.manual_seed(5)
    source = save(kind(llama_config(num_labels=1)), "scalar")
    critic = load_critic(str(source), torch.float32)
    with torch.no_grad():
        critic.head.weight += 1.0
        critic.head.bias += 0.5
    critic.save_pretrained(tmp_path / "again")
    again = load_critic(str(tmp_path / "again"), torch.float32)
    ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool)
    tokens = (ids, mask, ids + 1, mask)
    assert torch.equal(critic(*tokens), again(*tokens))


def refused(config: Config, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_models(config)
    assert str(error.value) == message


def test_a_folder_that_is_no_model_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(
        replace(config, actor=str(tmp_path / "empty")),
        f"actor: {tmp_path}/empty is not a model folder (it has no config.json)",
    )
    refused(
        replace(config, ref=str(tmp_path / "nowhere")), f"ref: no such folder: {tmp_path}/nowhere"
    )


def test_a_reward_model_with_several_labels_is_refused(config: Config, save: Save) -> None:
    source = save(LlamaForSequenceClassification(llama_config(num_labels=3)), "three")
    refused(
        replace(config, reward_model=str(source)),
        f"reward_model: {source} has 3 labels, expected one score",
    )


def test_a_reference_with_another_vocabulary_is_refused(config: Config, save: Save) -> None:
    source = save(LlamaForCausalLM(llama_config(vocab_size=70)), "wider")
    refused(
        replace(config, ref=str(source)),
        f"ref: vocabulary of 70 tokens ({source}) does not match the actor's 64 ({config.actor})",
    )


def test_a_critic_without_a_scalar_head_is_refused(save: Save) -> None:
    source = save(LlamaForTokenClassification(llama_config(num_labels=4)), "four")
    with pytest.raises(InputError, match=r"has no scalar head"):
        load_critic(str(source), torch.float32)
