"""Prompts to batches of token ids: encoding, the order of the epochs, padding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ppo.config import InputError
from ppo.prompt_files import read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EncodedPrompts", "encode_prompts", "left_pad", "prompt_batches", "read_prompts"]


@dataclass(frozen=True)
class EncodedPrompts:
    """Token ids of the prompts that stayed."""

    rows: list[list[int]]
    """Ids of each prompt: at most one BOS, first; no EOS at the end; never cut."""
    kept: list[int]
    """Index of each of them among the texts given."""
    dropped: int
    """How many prompts were over the limit."""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_prompt_tokens: int,
    long_prompts: Literal["error", "drop"],
    source: str,
) -> EncodedPrompts:
    """Encode each prompt with one BOS if the tokenizer has one, and without a closing EOS.

    An EOS at the end would tell the model that nothing follows; tokenizers and templates that add
    one, or a second BOS, are corrected here. Lengths count BOS. A prompt is never truncated.

    Args:
        tokenizer: of the actor.
        texts: the prompts; `read_prompts` gives them with their places for the messages.
        max_prompt_tokens: longest prompt allowed.
        long_prompts: "error" refuses a longer one, "drop" leaves it out.
        source: where the texts are from, for the messages.

    Raises:
        InputError: a prompt is too long ("error"), all are ("drop"), or one has no text and the
            tokenizer no BOS that could stand for it.
    """
    if not texts:
        raise InputError(f"{source}: no prompts in it")
    places = [getattr(text, "place", f"{source}: row {row}") for row, text in enumerate(texts, 1)]
    rows = _encode(tokenizer, texts)
    for text, place, row in zip(texts, places, rows, strict=True):
        if not row or (tokenizer.bos_token_id is None and not text.strip()):
            raise InputError(f"{place}: empty prompt, and the tokenizer has no BOS to start from")
    kept = [index for index, row in enumerate(rows) if len(row) <= max_prompt_tokens]
    dropped = len(rows) - len(kept)
    if dropped and (long_prompts == "error" or not kept):
        first = next(index for index, row in enumerate(rows) if len(row) > max_prompt_tokens)
        raise InputError(
            f"{places[first]}: prompt of {len(rows[first])} tokens is over the limit of "
            f"{max_prompt_tokens} (rollout.max_prompt_tokens); {dropped} of {len(rows)} prompts are"
            f"{'; rollout.long_prompts=drop leaves them out' if kept else ''}"
        )
    return EncodedPrompts(rows=[rows[index] for index in kept], kept=kept, dropped=dropped)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    # verbose=False: no warning about the model's length, which max_prompt_tokens takes care of
    encoded = tokenizer([str(text) for text in texts], truncation=False, verbose=False)
    rows = []
    for ids in encoded["input_ids"]:
        # EOS first: in GPT-2's vocabulary it is the same token as BOS
        end = next((i for i in range(len(ids), 0, -1) if ids[i - 1] != eos), 0)
        start = next((i for i in range(end) if ids[i] != bos), end)
        rows.append([*([] if bos is None else [bos]), *ids[start:end]])
    return rows


def prompt_batches(count: int, batch_size: int, seed: int, start: int = 0) -> Iterator[list[int]]:
    """Return an endless iterator over batches of prompt indices.

    Position n of the stream is entry n mod count of the permutation of epoch n // count, drawn
    from (seed, epoch) alone. So each index comes once in every epoch, every batch is full (one may
    span the end of an epoch), and batch `start` is found again without replaying those before it.

    Args:
        count: how many prompts there are, >= 1.
        batch_size: indices in each batch, >= 1; may exceed the number of prompts.
        seed: of the permutations.
        start: number of the first batch returned.

    Raises:
        ValueError: a count or size below 1, a start below 0.
    """
    for name, number, least in (
        ("count", count, 1),
        ("batch_size", batch_size, 1),
        ("start", start, 0),
    ):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    epoch, offset = divmod(start * batch_size, count)
    epochs = (_permutation(count, seed, number) for number in itertools.count(epoch))
    stream = itertools.islice(itertools.chain.from_iterable(epochs), offset, None)
    return iter(lambda: list(itertools.islice(stream, batch_size)), [])  # a batch is never []


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    # random() of a text seed is the same in every Python version; shuffle() need not be
    draw = random.Random(f"{seed} {epoch}").random
    return sorted(range(size), key=[draw() for _ in range(size)].__getitem__)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Join rows of ids, padded on the left.

    Args:
        rows: B rows of token ids, of any lengths; an empty one becomes all padding.
        pad_id: fills the places in front.

    Returns:
        input_ids: [B,P] int64, P the longest row.
        attention_mask: [B,P] bool, True = a token of the row (whatever its id).
    """
    width = max(map(len, rows), default=0)
    input_ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        start = width - len(row)
        input_ids[index, start:] = torch.tensor(row, dtype=torch.int64)
        attention_mask[index, start:] = True
    return input_ids, attention_mask
