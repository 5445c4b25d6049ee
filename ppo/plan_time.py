"""Time of a step on each GPU, phase by phase: a roofline, so a lower bound, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo.config import Config
from ppo.plan_memory import Batch, Machine, batch_of, generates_whole
from ppo.plan_models import Role, Shape, size_of


@dataclass(frozen=True)
class Speed:
    """What one GPU and its links do. Defaults: H100 SXM, eight in a node.

    Source: https://www.nvidia.com/en-us/data-center/h100/ (989 TFLOP/s in bfloat16 without
    sparsity, 67 in float32, 3.35 TB/s, NVLink 900 GB/s both ways); 400 Gbit/s a GPU between nodes.
    """

    flops: float = 989e12
    float32_flops: float = 67e12
    memory_bandwidth: float = 3.35e12
    node_link: float = 450e9
    net_link: float = 50e9
    gpus_per_node: int = 8
    flops_share: float = 0.4
    """Share of the peak that large matmuls of a transformer reach (Chowdhery et al. 2022, table 3,
    https://arxiv.org/abs/2204.02311: 0.21 to 0.46)."""
    bandwidth_share: float = 0.7

    def seconds(self, operations: float, dtype: str) -> float:
        """Time of so many floating-point operations."""
        peak = self.float32_flops if dtype == "float32" else self.flops
        return operations / (peak * self.flops_share)

    def reading(self, size: float) -> float:
        """Time to stream so many bytes from the GPU's memory."""
        return size / (self.memory_bandwidth * self.bandwidth_share)

    def moving(self, size: float, gpus: int) -> float:
        """Time of an all-gather or reduce-scatter of so many bytes: (N − 1)/N of them a GPU."""
        link = self.node_link if gpus <= self.gpus_per_node else self.net_link
        return size * (1 - 1 / gpus) / (link * self.bandwidth_share)


def forward_operations(shape: Shape, sequences: int, length: int) -> float:
    """Count the operations of a forward pass of the decoder, without the LM head.

    2·P·n for the layers (Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361) and
    2·layers·Q·L²·sequences for causal attention, half of 4·layers·Q·L² (Chowdhery et al. 2022,
    appendix B, https://arxiv.org/abs/2204.02311), with n = sequences·L tokens.
    """
    tokens = sequences * length
    attention = 2 * shape.layers * shape.query_width * length * tokens
    return 2 * shape.decoder_parameters * tokens + attention


def phase_seconds(
    config: Config, machine: Machine, speed: Speed, found: Sequence[Role]
) -> dict[str, float]:
    """Estimate the seconds of sampling, scoring and updates.

    Lengths are the longest allowed, so real steps are shorter; Python, kernel launches and waiting
    are left out, so real phases are longer, sampling through transformers above all. Communication
    overlaps with computation: the longer of both counts.
    """
    batch = batch_of(config, machine)
    actor = found[0].shape
    fits = generates_whole(config, machine, found)
    return {
        "generate": _generate(config, machine, speed, actor, batch, fits),
        "score": _score(config, machine, speed, found, batch),
        "update": _update(config, machine, speed, found, batch),
    }


def _generate(
    config: Config, machine: Machine, speed: Speed, actor: Shape, batch: Batch, gathered: bool
) -> float:
    """Prefill by operations; then each token reads the weights and the cache of all rows.

    Source: Pope et al. 2022, section 2, https://arxiv.org/abs/2211.05102.
    """
    size = size_of(config.dtype)
    weights = size * actor.parameters
    prefill = speed.seconds(forward_operations(actor, batch.responses, batch.prompt), config.dtype)
    cache = 2 * actor.layers * actor.key_value_width * batch.responses * size
    mean_length = batch.prompt + batch.response / 2
    read = speed.reading(weights + cache * mean_length)
    compute = speed.seconds(2 * actor.parameters * batch.responses, config.dtype)
    move = speed.moving(weights, machine.gpus) if machine.shards > 1 else 0.0
    each = max(read, compute, 0.0 if gathered else move)
    return prefill + batch.response * each + (move if gathered else 0.0)


def _score(
    config: Config, machine: Machine, speed: Speed, found: Sequence[Role], batch: Batch
) -> float:
    """One forward pass of each model over the rollout; under sharding a gather a micro-batch."""
    size, passes = size_of(config.dtype), -(-batch.responses // batch.micro)
    total = 0.0
    for role in (each for each in found if each.runs):
        operations = forward_operations(role.shape, batch.responses, batch.length)
        if role.name in ("actor", "reference"):
            operations += 2 * role.shape.head_parameters * batch.responses * batch.response
        move = speed.moving(size * role.shape.parameters, machine.gpus)
        total += max(
            speed.seconds(operations, config.dtype),
            passes * move if machine.shards > 1 else 0.0,
        )
    return total


def _update(
    config: Config, machine: Machine, speed: Speed, found: Sequence[Role], batch: Batch
) -> float:
    """Forward and backward of what trains, its communication, and AdamW's reads and writes.

    3 forward passes' worth, 2 where the weights are frozen (LoRA), 1 more with checkpointed
    activations; three matmuls with the LM head. Communication: DDP 2·Q·s a step, sharding 3·P·s a
    micro-batch (Rajbhandari et al. 2020, section 7, https://arxiv.org/abs/1910.02054).
    """
    size = size_of(config.dtype)
    micros = config.ppo.ppo_epochs * config.ppo.num_minibatches * -(-batch.minibatch // batch.micro)
    times = (2 if config.models.sharing == "lora" else 3) + config.models.gradient_checkpointing
    rows = config.ppo.ppo_epochs * batch.responses
    total = 0.0
    for role in (each for each in found if each.trained):
        compute = move = 0.0
        if role.runs:
            operations = times * forward_operations(role.shape, rows, batch.length)
            if role.name == "actor":
                operations += 6 * role.shape.head_parameters * rows * batch.response
            compute = speed.seconds(operations, config.dtype)
        if machine.shards > 1 and role.runs:
            move = micros * speed.moving(3 * size * role.shape.parameters, machine.gpus)
        elif machine.gpus > 1:
            move = config.updates_per_step * speed.moving(2 * size * role.trained, machine.gpus)
        # weight, gradient and two moments read, three of them written
        adam = speed.reading(7 * size * role.trained / machine.shards)
        total += max(compute, move) + config.updates_per_step * adam
    return total
