"""What flows through a PPO step: frozen dataclasses of tensors, each field with its shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
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

    def select(self, rows: Tensor) -> Minibatch:
        """Take these rows, and cut the columns that are padding in all of them."""
        part = {field.name: getattr(self, field.name)[rows] for field in fields(self)}
        widest_prompt = int(part["prompt_mask"].sum(1).max())
        widest_response = max(1, int(part["response_mask"].sum(1).max()))
        first = part["prompts"].shape[1] - widest_prompt
        for name, tensor in part.items():
            is_prompt = name in ("prompts", "prompt_mask")
            part[name] = tensor[:, first:] if is_prompt else tensor[:, :widest_response]
        return Minibatch(**part)

    def shuffled(self, parts: int, generator: torch.Generator) -> Iterator[Minibatch]:
        """Split the rows, in random order, into this many minibatches."""
        order = torch.randperm(len(self), generator=generator)
        for rows in order.tensor_split(parts):
            yield self.select(rows.to(self.prompts.device))


Batch = TypeVar("Batch", Rollout, Minibatch)


def split(batch: Batch, size: int | None) -> Iterator[tuple[slice, Batch]]:
    """Cut into micro-batches of at most this many rows (None: one), columns as they are."""
    rows = batch.prompts.shape[0]
    for start in range(0, rows, size or rows):
        part = slice(start, start + (size or rows))
        yield part, type(batch)(*(getattr(batch, field.name)[part] for field in fields(batch)))
