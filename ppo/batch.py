"""What flows through a PPO step: frozen dataclasses of tensors, each field with its shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Prompts and the responses that were sampled for them."""

    prompts: Tensor  # [B,P] int64, left-padded
    prompt_mask: Tensor  # [B,P] bool, True = a token of the prompt
    responses: Tensor  # [B,T] int64, right-padded
    response_mask: Tensor  # [B,T] bool, True = this token counts (the EOS does, padding does not)
    finished: Tensor  # [B] bool, True = the response ends with an EOS of its own

    @property
    def sequences(self) -> Tensor:
        """Prompt and response of each row, [B,P+T]."""
        return torch.cat([self.prompts, self.responses], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """True at the tokens of prompt and response, [B,P+T]."""
        return torch.cat([self.prompt_mask, self.response_mask], dim=1)

    def to(self, device: torch.device) -> Rollout:
        """The same on a device."""
        return Rollout(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Minibatch:
    """What the clipped update needs of a rollout, or of some rows of it."""

    prompts: Tensor  # [B,P]
    prompt_mask: Tensor  # [B,P]
    responses: Tensor  # [B,T]
    response_mask: Tensor  # [B,T]
    old_logprobs: Tensor  # [B,T] fp32, nats
    ref_logprobs: Tensor  # [B,T] fp32, nats
    old_values: Tensor  # [B,T] fp32
    advantages: Tensor  # [B,T] fp32
    returns: Tensor  # [B,T] fp32

    def __len__(self) -> int:
        return self.prompts.shape[0]

    def shuffled(self, parts: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """Split the rows, in random order, into this many minibatches."""
        order = torch.randperm(len(self), generator=generator)
        for rows in order.tensor_split(parts):
            yield take(self, rows)


Batch = TypeVar("Batch", Rollout, Minibatch)


def take(batch: Batch, rows: Tensor) -> Batch:
    """Take these rows, and cut the columns that are padding in all of them."""
    rows = rows.to(batch.prompts.device)
    part = {field.name: getattr(batch, field.name)[rows] for field in fields(batch)}
    widest_prompt = int(part["prompt_mask"].sum(1).max())
    widest_response = max(1, int(part["response_mask"].sum(1).max()))
    first = batch.prompts.shape[1] - widest_prompt
    for name, tensor in part.items():
        if name in ("prompts", "prompt_mask"):
            part[name] = tensor[:, first:]
        elif tensor.dim() == 2:
            part[name] = tensor[:, :widest_response]
    return type(batch)(**part)


def split(
    batch: Batch, size: int | None = None, tokens: int | None = None, *, packed: bool = False
) -> Iterator[tuple[Tensor, Batch]]:
    """Cut into micro-batches; yield the rows of each, [n] int64, and what `take` makes of them.

    Args:
        batch: of any number of rows.
        size: most rows in each, in their order. None: all.
        tokens: most tokens in each, padding included, with the longest rows first; a row that is
            longer goes alone. Comes before `size`.
        packed: whether padding costs nothing.
    """
    if tokens is None:
        every = torch.arange(batch.prompts.shape[0])
        groups = list(torch.split(every, size or max(1, len(every))))
    else:
        lengths = [mask.sum(1).tolist() for mask in (batch.prompt_mask, batch.response_mask)]
        groups = [torch.tensor(rows) for rows in _by_length(lengths, tokens, packed)]
    for rows in groups:
        yield rows, take(batch, rows)


def _by_length(lengths: Sequence[list[int]], tokens: int, packed: bool) -> Iterator[list[int]]:
    prompts, responses = lengths
    order = sorted(range(len(prompts)), key=lambda row: -prompts[row] - responses[row])
    group: list[int] = []
    for row in order:
        rows = [*group, row]
        if packed:
            cost = sum(prompts[each] + responses[each] for each in rows)
        else:  # prompts are padded on the left, responses on the right
            widest = max(prompts[each] for each in rows) + max(responses[each] for each in rows)
            cost = len(rows) * widest
        if group and cost > tokens:
            yield group
            group = []
        group.append(row)
    yield group


def join(parts: Sequence[tuple[Tensor, Tensor]], width: int | None = None) -> Tensor:
    """Put what came of micro-batches back in the order of their rows, padded with 0 to `width`."""
    rows = torch.cat([rows for rows, _ in parts])
    found = [part for _, part in parts]
    if width is not None:
        found = [F.pad(part, (0, width - part.shape[1])) for part in found]
    joined = torch.cat(found)
    return joined[rows.argsort().to(joined.device)]
