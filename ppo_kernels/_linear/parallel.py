"""A head whose vocabulary is spread over ranks: each reduces its columns, one gather joins them.

Per row a rank sends its largest logit, the sum of its exponentials, the entropy among its own
columns, and the logit of the token if the token is one of them. With P_r the probability of
rank r's columns, H = Σ_r P_r·(H_r − log P_r).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels._linear.head import Gradients, Head, Settings, Wanted
from ppo_kernels._linear.rows import row_kernels
from ppo_kernels.reference import IGNORE_INDEX

_LOWEST = -3.4028234663852886e38  # what the kernels call the maximum of a shard without any logit


def combine_shards(parts: Tensor, temperature: float, nats: float) -> tuple[Tensor, Tensor, Tensor]:
    """Join the shards of a vocabulary.

    Args:
        parts: [R, n, 5]: per shard and row the maximum m of the logits z, log Σ e^((z − m)/τ),
            the entropy, z of the token, and 1 if the token is in this shard, else 0.
        temperature: τ.
        nats: Unit of the second and the third number.

    Returns:
        log π(a) [n], H [n], and [n, 3]: the first three numbers, of the whole vocabulary. NaN
        where no shard has the token.
    """
    m, log_s, h, z, owned = parts.unbind(-1)
    top = m.amax(0)
    nothing = (m <= _LOWEST) | (log_s == -torch.inf)
    log_mass = torch.where(nothing, -torch.inf, (m - top) / temperature + log_s * nats)
    log_total = log_mass.logsumexp(0)
    log_p = log_mass - log_total
    p = log_p.exp()
    entropy = (p * torch.where(p > 0, h * nats - log_p, 0)).sum(0)
    z_token = torch.where(owned > 0, z, -torch.inf).amax(0)
    nowhere = torch.where(owned.amax(0) > 0, 0.0, torch.nan).to(parts.dtype)
    logprobs = (z_token - top) / temperature - log_total + nowhere
    stats = torch.stack([top, log_total / nats, entropy / nats], -1)
    return logprobs, entropy + nowhere, stats


class ShardedLogprobs(torch.autograd.Function):
    """log π(a) and H from one rank's rows of the LM head; every rank gets the whole result."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        settings: Settings,
        with_entropy: bool,
        impl: str,
        group: dist.ProcessGroup,
        vocab_start: int,
    ) -> tuple[Tensor, Tensor]:
        counted = tokens != IGNORE_INDEX
        own = tokens - vocab_start
        owned = counted & (own >= 0) & (own < len(weight))
        own = torch.where(counted, torch.where(owned, own, 0), IGNORE_INDEX)
        part = _reduce_shard(hidden, weight, bias, own, owned, settings, with_entropy, impl)
        parts = part.new_empty(group.size(), *part.shape)
        dist.all_gather(list(parts.unbind()), part, group=group)
        nats = row_kernels(impl).NATS
        temperature = _row_temperature(settings)
        logprobs, entropy, stats = combine_shards(parts, temperature, nats)
        # A token that no rank has: NaN forward, no gradient.
        own = torch.where(parts[..., 4].amax(0) > 0, own, IGNORE_INDEX)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, own, owned, stats)
        ctx.settings, ctx.impl, ctx.group = settings, impl, group
        ctx.with_entropy = with_entropy
        return torch.where(counted, logprobs, 0), torch.where(counted, entropy, 0)

    @staticmethod
    def backward(ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("vocabulary-parallel log-probabilities are differentiable once")
        hidden, weight, bias, own, owned, stats = ctx.saved_tensors
        g_entropy = g_entropy if ctx.with_entropy else None
        wanted = Wanted(*ctx.needs_input_grad[:3])
        if g_logprobs is None and g_entropy is None:
            return (None,) * 9
        totals = _shard_gradients(
            (hidden, weight, bias), own, owned, stats, (g_logprobs, g_entropy), ctx, wanted
        )
        if wanted.hidden:
            dist.all_reduce(totals[0], group=ctx.group)
        given = [total if want else None for total, want in zip(totals, wanted, strict=True)]
        return (*given, *[None] * 6)


def _row_temperature(settings: Settings) -> float:
    cap = settings.logit_softcap
    return settings.temperature / (settings.logit_scale if cap is None else cap)


def _reduce_shard(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    own: Tensor,
    owned: Tensor,
    settings: Settings,
    with_entropy: bool,
    impl: str,
) -> Tensor:
    """[n, 5] for `combine_shards`; tokens of other ranks stand as 0."""
    rows, wide = row_kernels(impl), torch.float32
    if settings.dtype == torch.float64:
        wide = torch.float64
    parts = hidden.new_zeros((len(own), 5), dtype=wide)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(weight, bias, settings)
        chunks = head.chunks(own != IGNORE_INDEX, settings)
        for part, _, logits in head.logits(hidden, chunks, settings.dtype):
            _, _, sums = rows.forward_rows(logits, own[part], head.temperature, with_entropy)
            z = logits.gather(1, own[part].clamp(min=0)[:, None]).to(wide)
            parts[part] = torch.cat([sums, z, owned[part, None].to(wide)], 1)
    return parts


def _shard_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    own: Tensor,
    owned: Tensor,
    stats: Tensor,
    grads: tuple[Tensor | None, Tensor | None],
    ctx: Any,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's columns; with the sums of all, π is that of all."""
    hidden, weight, bias = inputs
    rows, settings = row_kernels(ctx.impl), ctx.settings
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(weight, bias, settings)
        chunks = head.chunks(own != IGNORE_INDEX, settings)
        totals = Gradients(hidden, weight, bias, chunks, wanted)
        for part, h, logits in head.logits(hidden, chunks, settings.dtype):
            g = [None if x is None else x[part] * head.slope for x in grads]
            sums, tanh = stats[part], head.remember(logits)
            column = _slope_without_token(logits[:, 0], sums, head.temperature, rows.NATS, g)
            rows.backward_rows_(logits, own[part], head.temperature, sums, *g)
            elsewhere = ~owned[part] & (own[part] != IGNORE_INDEX)
            logits[:, 0] = torch.where(elsewhere, column.to(logits.dtype), logits[:, 0])
            head.pass_cap_(logits, tanh)
            totals.add(head, part, h, logits)
        return totals.results()


def _slope_without_token(
    z: Tensor, stats: Tensor, temperature: float, nats: float, g: list[Tensor | None]
) -> Tensor:
    """dz of a column that is not the token: the kernels took column 0 for it."""
    top, log_s, h = stats.unbind(-1)
    log_p = (z.to(stats.dtype) - top) / temperature - log_s * nats
    p = log_p.exp()
    slope = torch.zeros_like(p)
    if g[0] is not None:
        slope -= g[0]
    if g[1] is not None:
        slope -= g[1] * torch.where(p > 0, log_p + h * nats, 0)
    return p * slope / temperature
