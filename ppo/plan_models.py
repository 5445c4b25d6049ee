"""What a memory plan knows of the models: sizes and activations, from `config.json` alone.

Models are built on the meta device and run on fake tensors, so that no weight is ever allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from ppo.adapters import base_of_adapter
from ppo.config import Config
from ppo.model_folders import read_config
from ppo.schema import InputError


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass keeps for the backward pass."""

    layer: int
    """Of each decoder layer."""
    rest: int
    """Of embeddings, masks and the last norm."""
    boundary: int
    """Of the hidden states between two layers: what checkpointing keeps of a layer."""


@dataclass(frozen=True, eq=False)
class Shape:
    """The numbers of one architecture that memory and time depend on."""

    config: PretrainedConfig
    parameters: int
    layer_parameters: int
    layers: int
    hidden: int
    vocab: int
    key_value_width: int
    """Keys of all heads of one token in one layer, as the cache holds them."""
    query_width: int
    adapter_parameters: int
    """Of one LoRA adapter with the run's rank and targets."""

    @property
    def decoder_parameters(self) -> int:
        """Those that every token is multiplied with: all layers."""
        return self.layers * self.layer_parameters

    @property
    def outer_parameters(self) -> int:
        """The others: embeddings, LM head, last norm."""
        return self.parameters - self.decoder_parameters

    @property
    def head_parameters(self) -> int:
        """Weight of the LM head, [V,D]."""
        return self.vocab * self.hidden


@dataclass(frozen=True)
class Role:
    """One of the models of a run: the parameters that it adds, and those of them that train."""

    name: str
    shape: Shape
    held: int
    trained: int
    adapter: int = 0
    """How many of both are a LoRA adapter, which PEFT keeps in float32."""
    runs: bool = True
    """Whether it has a forward pass of its own; a value head on the actor has none."""


def roles(config: Config) -> list[Role]:
    """Say who holds and trains how many parameters under the run's `models.sharing`.

    separate: P for the actor, P' + D + 1 for the critic, P for the reference, P_r for the reward
    model. trunk: D + 1 for the critic. lora: P + A for the actor, A + D + 1 for the critic, 0 for
    the reference, with A = Σ r·(in + out) over the adapted layers (Hu et al. 2021,
    https://arxiv.org/abs/2106.09685, section 4.1).

    Raises:
        InputError: the actor is not named, or a model's `config.json` cannot be read.
    """
    if config.actor is None:
        raise InputError("actor must be given: the plan is made from its config.json")
    transformers_logging.set_verbosity_error()
    sharing = config.models.sharing
    source = base_of_adapter(config.actor) or config.actor
    actor = shape_of("actor", source, AutoModelForCausalLM, config)
    adapter = actor.adapter_parameters if sharing == "lora" else 0
    found = [
        Role("actor", actor, actor.parameters + adapter, adapter or actor.parameters, adapter),
    ]
    if config.needs_critic:
        found.append(_critic(config, actor))
    ref = shape_of("ref", config.ref or source, AutoModelForCausalLM, config)
    found.append(Role("reference", ref, 0 if sharing == "lora" else ref.parameters, 0))
    if config.reward_model:
        reward = shape_of(
            "reward_model", config.reward_model, AutoModelForSequenceClassification, config
        )
        found.append(Role("reward model", reward, reward.parameters, 0))
    return found


def _critic(config: Config, actor: Shape) -> Role:
    """The critic as `load_models` would make it; equal vocabularies stand for equal tokenizers."""
    head = actor.hidden + 1
    if config.models.sharing == "trunk":
        return Role("critic", actor, head, head, runs=False)
    if config.models.sharing == "lora":
        size = actor.adapter_parameters + head
        return Role("critic", actor, size, size, actor.adapter_parameters)
    source, reward = config.critic, config.reward_model
    if source is None and reward is not None:
        other = read_config("reward_model", reward)
        alike = other.model_type == actor.config.model_type
        source = reward if alike and other.get_text_config().vocab_size == actor.vocab else None
    trunk = shape_of("critic", source or str(config.actor), AutoModel, config)
    size = trunk.parameters + trunk.hidden + 1
    return Role("critic", trunk, size, size)


def shape_of(key: str, source: str, auto: Any, config: Config) -> Shape:
    """Measure the architecture of a model folder or hub id, on the meta device."""
    config_file = Path(source)
    read = read_config(key, source)
    text: Any = read.get_text_config()
    model = _build(auto, read, key, config_file)
    layers = int(text.num_hidden_layers)
    shorter = _build(auto, _with_layers(read, layers - 1), key, config_file)
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    lora = config.models
    targets = lora.lora_targets.split(",") if lora.lora_targets else None
    return Shape(
        config=read,
        parameters=_count(model),
        layer_parameters=_count(model) - _count(shorter),
        layers=layers,
        hidden=int(text.hidden_size),
        vocab=int(text.vocab_size),
        key_value_width=width * int(getattr(text, "num_key_value_heads", None) or heads),
        query_width=width * heads,
        adapter_parameters=adapter_parameters(model, lora.lora_rank, targets),
    )


def adapter_parameters(model: nn.Module, rank: int, targets: Sequence[str] | None) -> int:
    """Count the parameters of a LoRA adapter: Σ r·(in + out) over linear layers but the LM head.

    Args:
        model: may be on the meta device.
        rank: r.
        targets: last parts of the names of the layers. None: all linear ones.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    wanted = None if targets is None else {name.strip() for name in targets}
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head:
            continue
        if wanted is None or name.rpartition(".")[2] in wanted:
            total += rank * sum(module.weight.shape)
    return total


@cache
def activations(shape: Shape, rows: int, length: int, dtype: torch.dtype) -> Activations:
    """Count what autograd saves in a forward pass of the decoder, parameters excepted.

    Models of one and of two layers are run on fake tensors; the difference is a layer. For a Llama
    of hidden size D, feed-forward size F, H heads of total width Q and L = length this is
    rows·L·(6D + 4Q + 4F + H + L + 2) numbers in float32: two norms (3D each), queries, keys and
    values as wide as the queries, attention's output, four tensors of the feed-forward part; then
    attention's normaliser, its mask, and the norms' scales. Korthikanti et al. 2022,
    https://arxiv.org/abs/2205.05198, section 4.1, count the GPT layer in this way.

    Args:
        shape: of the model; attention as transformers chooses it (SDPA).
        rows: sequences in the micro-batch.
        length: prompt and response tokens of each.
        dtype: of weights and activations.
    """
    one, two = (_saved(shape, layers, rows, length, dtype) for layers in (1, 2))
    boundary = rows * length * shape.hidden * dtype.itemsize
    return Activations(layer=two - one, rest=max(0, 2 * one - two), boundary=boundary)


def _saved(shape: Shape, layers: int, rows: int, length: int, dtype: torch.dtype) -> int:
    storages: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with FakeTensorMode():
        model = AutoModel.from_config(_with_layers(shape.config, layers), dtype=dtype).eval()
        ids = torch.zeros(rows, length, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage()._cdata, None)
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    text: Any = changed.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return changed


def _build(auto: Any, config: PretrainedConfig, key: str, source: Path) -> nn.Module:
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config)
    except Exception as error:  # whatever an architecture does with its own config
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{key}: cannot build {str(source)!r}: {reason}") from None
    return model


@cache
def size_of(dtype: str) -> int:
    """Bytes of a number in the run's `dtype`."""
    format_: torch.dtype = getattr(torch, dtype)
    return format_.itemsize


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
