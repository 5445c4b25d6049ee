"""Tiny models on disk, made from a seed: enough to check the arithmetic of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 64))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w3")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def llama_config(**changes: object) -> LlamaConfig:
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.fixture
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config()).eval()


@pytest.fixture
def gpt2() -> PreTrainedModel:
    """Absolute positions and dropout: what goes wrong with padding shows here."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a model and the tiny tokenizer as a folder."""

    def write(model: PreTrainedModel, name: str) -> Path:
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def folders(llama: PreTrainedModel, save: Callable[..., Path], tmp_path: Path) -> dict[str, str]:
    """Actor, reward model and prompts, as `--actor --reward-model --prompts` take them."""
    torch.manual_seed(1)
    reward_model = LlamaForSequenceClassification(llama_config(num_labels=1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{i} w{i + 1} w5"}}\n' for i in range(6, 14)))
    return {
        "actor": str(save(llama, "actor")),
        "reward_model": str(save(reward_model, "reward")),
        "prompts": str(prompts),
    }
