"""Memory of a run on each GPU, phase by phase, calculated from its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from ppo.config import Config
from ppo.plan_models import Activations, Role, Shape, activations, size_of

Strategy: TypeAlias = Literal["ddp", "fsdp2", "zero3"]

ZERO3_LIVE_PARAMETERS = 1_000_000_000
ZERO3_BUCKET = 500_000_000
"""DeepSpeed's defaults of `stage3_max_live_parameters` and `reduce_bucket_size`,
https://www.deepspeed.ai/docs/config-json/."""
CHUNK_BYTES, CHUNK_ROWS = 1 << 30, 2048
"""Chunk of logits that the linear operators take on a GPU: see their `chunk_bytes`."""


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    gpus: int = 1
    gpu_memory: float = 80e9
    strategy: Strategy = "ddp"
    master_weights: bool = False
    """bfloat16 weights with float32 copies and moments; the trainer does without today."""

    @property
    def shards(self) -> int:
        """Into how many parts weights, gradients and optimiser are cut."""
        return 1 if self.strategy == "ddp" else self.gpus


@dataclass(frozen=True)
class Held:
    """Bytes that a role holds on each GPU from start to end; gradients during updates only."""

    role: str
    parameters: float
    gradients: float
    optimiser: float


@dataclass(frozen=True)
class Batch:
    """How a rollout is cut, on each GPU; lengths are the longest allowed."""

    responses: int
    minibatch: int
    micro: int
    prompt: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Phase:
    """Peak of one phase on each GPU, bytes: `held` and `gradients`, and what comes on top."""

    name: str
    held: float
    gradients: float
    gathered: float
    working: float
    head: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.held + self.gradients + self.gathered + self.working + self.head


def batch_of(config: Config, machine: Machine) -> Batch:
    """Cut the rollout as the trainer does, an equal share for each GPU, rounded up."""
    responses = -(-config.rollout.responses // machine.gpus)
    minibatch = -(-responses // config.ppo.num_minibatches)
    micro = config.ppo.micro_batch_size
    if config.ppo.micro_batch_tokens is not None:
        micro = config.ppo.micro_batch_tokens // config.rollout.longest
    return Batch(
        responses=responses,
        minibatch=minibatch,
        micro=min(micro or minibatch, minibatch),
        prompt=config.rollout.max_prompt_tokens,
        response=config.rollout.max_new_tokens,
    )


def held(config: Config, machine: Machine, found: Sequence[Role]) -> list[Held]:
    """Count weights, gradients and AdamW's two moments of each role.

    With s bytes a number, P parameters of which Q train, and N shards:
    weights s·P/N, gradients s·Q/N (twice that under DDP, whose buckets are copies), moments
    2·s·Q/N; with master weights 4·Q/N more and moments 8·Q/N (Rajbhandari et al. 2020, section 3.1,
    https://arxiv.org/abs/1910.02054). LoRA adapters are in float32 throughout. AdamW's step
    counters, 4 bytes a tensor, are left out.
    """
    size, shards = size_of(config.dtype), machine.shards
    copies = 2 if machine.strategy == "ddp" and machine.gpus > 1 else 1

    def count(role: Role, numbers: int) -> int:
        return size * (numbers - role.adapter) + 4 * role.adapter

    def moments(role: Role) -> int:
        if machine.master_weights and size < 4:
            return 12 * (role.trained - role.adapter) + 8 * role.adapter
        return 2 * count(role, role.trained)

    return [
        Held(
            role.name,
            parameters=count(role, role.held) / shards,
            gradients=copies * count(role, role.trained) / shards if role.trained else 0,
            optimiser=moments(role) / shards if role.trained else 0,
        )
        for role in found
    ]


def key_value_cache(shape: Shape, rows: int, length: int, size: int) -> int:
    """Count the bytes of keys and values of all layers: 2·layers·K·rows·length·s.

    One layer more, because transformers' cache grows by concatenation, which holds the old and the
    new tensors of a layer for a moment. Source: Pope et al. 2022, section 2.1,
    https://arxiv.org/abs/2211.05102.
    """
    return 2 * (shape.layers + 1) * shape.key_value_width * rows * length * size


def full_logits(rows: int, shape: Shape, size: int, *, backward: bool, trained: bool) -> int:
    """Count what log_softmax and gather over [rows,V] logits hold at their peak.

    The logits and their log-softmax in float32, rows·V·(s + 4); backward the gradient of the
    latter, and where the logits are in 16 bits their own as well. Where the head trains, its
    gradient before it is added, s·V·D.
    """
    if not backward:
        return rows * shape.vocab * (size + 4)
    logits = rows * shape.vocab * (8 + (2 * size if size < 4 else size))
    return logits + (size * shape.head_parameters if trained else 0)


def fused_head(rows: int, shape: Shape, size: int, *, backward: bool, trained: bool) -> int:
    """Count what `linear_ppo_loss` or `linear_token_logprobs` hold at their peak.

    A chunk of logits in float32; backward the gradient of the hidden states, s·rows·D, and where
    the head trains its gradient in float32, 4·V·D. See the benchmark `linear_memory`.
    """
    row_bytes = 4 * shape.vocab
    chunk = min(rows, max(CHUNK_ROWS, CHUNK_BYTES // row_bytes)) * row_bytes
    if not backward:
        return chunk
    return chunk + rows * shape.hidden * size + (4 * shape.head_parameters if trained else 0)


def gathered(shape: Shape, machine: Machine, size: int, *, backward: bool) -> int:
    """Count the weights that a sharded model has whole on a GPU while it runs.

    FSDP2 with a unit for each layer: two layers (one at work, one on its way), and the root unit
    (embeddings, head); backward the gradient of a layer and of the root (Zhao et al. 2023, section
    4, https://arxiv.org/abs/2304.11277). ZeRO-3: its `stage3_max_live_parameters`, and backward a
    bucket of gradients.
    """
    if machine.shards == 1:
        return 0
    if machine.strategy == "zero3":
        bucket = min(shape.parameters, ZERO3_BUCKET) if backward else 0
        return size * (min(shape.parameters, ZERO3_LIVE_PARAMETERS) + bucket)
    units = 2 * shape.layer_parameters + shape.outer_parameters
    gradients = shape.layer_parameters + shape.outer_parameters if backward else 0
    return size * (units + gradients)


def phases(
    config: Config, machine: Machine, found: Sequence[Role], *, fused: bool = True
) -> list[Phase]:
    """Calculate the peak of sampling, scoring, each model's backward pass, and the optimiser step.

    Args:
        config: of the run.
        machine: GPUs and how they share.
        found: from `roles`.
        fused: whether the LM head goes through the linear operators, or full logits are made.
    """
    parts, size = held(config, machine, found), size_of(config.dtype)
    base = sum(part.parameters + part.optimiser for part in parts)
    gradients = sum(part.gradients for part in parts)
    running = [role for role in found if role.runs]
    head, no_head = (_head(config, machine, found[0].shape, fused, back) for back in (True, False))
    units = max(gathered(role.shape, machine, size, backward=False) for role in running)
    layer = max(_activations(config, machine, role).layer for role in running)
    updates = [
        Phase(
            f"update {role.name}",
            base,
            gradients,
            gathered(role.shape, machine, size, backward=True),
            _kept(config, machine, role),
            head if role.name == "actor" else 0,
        )
        for role in running
        if role.trained
    ]
    # torch's AdamW goes over all tensors at once on a GPU, with a temporary copy of the weights
    copy = max(role.trained for role in found) * size / machine.shards
    whole, by_layer = _sampling(config, machine, found[0].shape, base)
    return [
        whole if generates_whole(config, machine, found) else by_layer,
        Phase("score", base, 0, units, layer, no_head),
        *updates,
        Phase("optimiser step", base, gradients, 0, copy, 0),
    ]


def _head(config: Config, machine: Machine, actor: Shape, fused: bool, backward: bool) -> int:
    batch, size = batch_of(config, machine), size_of(config.dtype)
    way = fused_head if fused else full_logits
    trained = config.models.sharing != "lora"
    rows = batch.micro * batch.response
    return way(rows, actor, size, backward=backward, trained=trained)


def _activations(config: Config, machine: Machine, role: Role) -> Activations:
    batch, dtype = batch_of(config, machine), getattr(torch, config.dtype)
    return activations(role.shape, batch.micro, batch.length, dtype)


def _kept(config: Config, machine: Machine, role: Role) -> int:
    """What a micro-batch keeps; checkpointed, one layer and the states between all of them.

    Source: Chen et al. 2016, section 4, https://arxiv.org/abs/1604.06174.
    """
    saved, layers = _activations(config, machine, role), role.shape.layers
    if config.models.gradient_checkpointing:
        return layers * saved.boundary + saved.layer + saved.rest
    return layers * saved.layer + saved.rest


def generates_whole(config: Config, machine: Machine, found: Sequence[Role]) -> bool:
    """Whether a sharded actor fits whole beside the rest while it samples.

    It is then gathered once for a rollout, otherwise layer by layer for every token.
    """
    base = sum(part.parameters + part.optimiser for part in held(config, machine, found))
    return _sampling(config, machine, found[0].shape, base)[0].total <= machine.gpu_memory


def _sampling(config: Config, machine: Machine, actor: Shape, base: float) -> tuple[Phase, Phase]:
    """The phase with the actor gathered whole, and gathered layer by layer."""
    size, batch = size_of(config.dtype), batch_of(config, machine)
    cache = key_value_cache(actor, batch.responses, batch.length, size)
    # next-token logits, their float32 copy and the probabilities
    logits = batch.responses * actor.vocab * (size + 8)
    whole = size * actor.parameters * (1 - 1 / machine.shards)
    layers = gathered(actor, machine, size, backward=False)
    first, second = (Phase("generate", base, 0, each, cache, logits) for each in (whole, layers))
    return first, second


def largest_micro_batch(config: Config, machine: Machine, found: Sequence[Role]) -> int | None:
    """Find the largest `ppo.micro_batch_size` whose phases all fit; None where even 1 does not."""

    def fit(micro: int) -> bool:
        changed = replace(
            config, ppo=replace(config.ppo, micro_batch_size=micro, micro_batch_tokens=None)
        )
        return all(p.total <= machine.gpu_memory for p in phases(changed, machine, found))

    low, high = 0, batch_of(config, machine).minibatch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low or None
