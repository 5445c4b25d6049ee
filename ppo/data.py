"""Prompts to batches of token ids: encoding, the order of the epochs, padding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from ppo.chat import render_chat, with_system
from ppo.prompt_files import Content, Prompt, read_prompts
from ppo.schema import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "EncodedPrompts",
    "encode_contents",
    "encode_prompts",
    "left_pad",
    "prompt_batches",
    "read_prompts",
]


LongPrompts: TypeAlias = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class EncodedPrompts:
    """Token ids of the prompts that stayed: what the generator and the training both see."""

    rows: list[list[int]]
    """Ids of each prompt: at most one BOS, first; no EOS that the tokenizer appended."""
    kept: list[int]
    """Index of each of them among the prompts given."""
    extra: list[Mapping[str, Any]]
    """The other columns of each of them."""
    dropped: int
    """How many prompts were over the limit and are left out."""
    truncated: int
    """How many prompts were over the limit and have lost their first tokens."""
    contents: list[Content]
    """Text or chat messages of each of them, as the file has them."""

    def take(self, indices: Sequence[int], times: int = 1) -> EncodedPrompts:
        """These prompts, each so many times in a row."""
        picked = [index for index in indices for _ in range(times)]
        return replace(
            self,
            rows=[self.rows[index] for index in picked],
            kept=[self.kept[index] for index in picked],
            extra=[self.extra[index] for index in picked],
            contents=[self.contents[index] for index in picked],
        )

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The other columns by name; None where a row has no such column."""
        names = dict.fromkeys(name for row in self.extra for name in row)
        return {name: [row.get(name) for row in self.extra] for name in names}

    def __len__(self) -> int:
        return len(self.rows)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_prompt_tokens: int,
    long_prompts: LongPrompts,
    source: str,
    *,
    system_prompt: str | None = None,
    continue_assistant: bool = False,
) -> EncodedPrompts:
    """Encode each prompt, and see to the long ones.

    Args:
        tokenizer: of the actor.
        prompts: text or chat messages; `read_prompts` gives them.
        max_prompt_tokens: longest prompt allowed, BOS and chat template included.
        long_prompts: "error" refuses a longer one, "drop" leaves it out, "truncate" keeps BOS and
            the last tokens.
        source: where the prompts are from, for the messages.
        system_prompt: goes in front of chat messages that have none of their own.
        continue_assistant: whether chat messages may end with the assistant's turn.

    Raises:
        InputError: as `encode_contents`; a prompt is too long ("error"), or all are ("drop").
    """
    if not prompts:
        raise InputError(f"{source}: no prompts in it")
    places = [prompt.place or f"{source}: row {row}" for row, prompt in enumerate(prompts, 1)]
    rows = encode_contents(
        tokenizer,
        [prompt.content for prompt in prompts],
        places,
        system_prompt=system_prompt,
        continue_assistant=continue_assistant,
    )
    long = [index for index, row in enumerate(rows) if len(row) > max_prompt_tokens]
    kept = [index for index, row in enumerate(rows) if len(row) <= max_prompt_tokens]
    if long and (long_prompts == "error" or (long_prompts == "drop" and not kept)):
        raise InputError(
            f"{places[long[0]]}: prompt of {len(rows[long[0]])} tokens is over the limit of "
            f"{max_prompt_tokens} (rollout.max_prompt_tokens); {len(long)} of {len(rows)} prompts "
            f"are{'; rollout.long_prompts=drop leaves them out' if kept else ''}"
        )
    if long_prompts == "truncate":
        kept = list(range(len(rows)))
    return EncodedPrompts(
        rows=[_last(rows[index], max_prompt_tokens, tokenizer.bos_token_id) for index in kept],
        kept=kept,
        extra=[prompts[index].extra for index in kept],
        dropped=len(rows) - len(kept),
        truncated=len(long) if long_prompts == "truncate" else 0,
        contents=[prompts[index].content for index in kept],
    )


def _last(row: list[int], limit: int, bos: int | None) -> list[int]:
    """The last `limit` tokens, of which the first is BOS where the row starts with it."""
    if len(row) <= limit:
        return row
    start = [bos] if bos is not None and row[0] == bos else []
    return start + row[len(row) - limit + len(start) :]


def encode_contents(
    tokenizer: PreTrainedTokenizerBase,
    contents: Sequence[Content],
    places: Sequence[str],
    *,
    system_prompt: str | None = None,
    continue_assistant: bool = False,
) -> list[list[int]]:
    """Encode texts and chat messages as prompts.

    A text gets one BOS if the tokenizer has one, and no closing EOS: an EOS at the end would tell
    the model that nothing follows, so what a tokenizer adds of it is taken off. Chat messages are
    rendered by the chat template with the header of the assistant's turn; the template alone says
    where BOS and EOS stand, and the tokenizer adds none; a second BOS at the start is taken off.

    Args:
        tokenizer: its chat template renders the messages.
        contents: text or chat messages.
        places: of each of them, for the messages of errors.
        system_prompt: goes in front of chat messages that do not begin with a system message.
        continue_assistant: messages that end with the assistant's turn are refused without it; with
            it that turn stays open, without a new header.

    Returns:
        The token ids of each of them.

    Raises:
        InputError: an empty text where the tokenizer has no BOS that could stand for it; a system
            prompt for a text; the assistant's turn last; messages that cannot be rendered.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts: list[str] = []
    for content, place in zip(contents, places, strict=True):
        if isinstance(content, str):
            if system_prompt is not None:
                raise InputError(f"{place}: system_prompt needs chat messages, got text")
            texts.append(content)
        else:
            messages = with_system(content, system_prompt)
            texts.append(render_chat(tokenizer, messages, place, continue_assistant))
    plain = [isinstance(content, str) for content in contents]
    rows = _tokenize(tokenizer, texts, plain)
    for index, (text, place) in enumerate(zip(texts, places, strict=True)):
        fix = _one_bos if plain[index] else _no_second_bos
        rows[index] = fix(rows[index], bos, eos)
        if not rows[index] or (bos is None and not text.strip()):
            raise InputError(f"{place}: empty prompt, and the tokenizer has no BOS to start from")
    return rows


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: Sequence[bool]
) -> list[list[int]]:
    """Tokenise the texts, with the tokenizer's special tokens where `special` says so."""
    rows: list[list[int]] = [[] for _ in texts]
    for add in (True, False):
        which = [index for index, wanted in enumerate(special) if wanted == add]
        if not which:
            continue
        batch = [texts[index] for index in which]
        # verbose=False: no warning about the model's length, which the caller takes care of
        encoded = tokenizer(batch, truncation=False, verbose=False, add_special_tokens=add)
        for index, ids in zip(which, encoded["input_ids"], strict=True):
            rows[index] = ids
    return rows


def _one_bos(ids: list[int], bos: int | None, eos: int | None) -> list[int]:
    # EOS first: in GPT-2's vocabulary it is the same token as BOS
    end = next((i for i in range(len(ids), 0, -1) if ids[i - 1] != eos), 0)
    start = next((i for i in range(end) if ids[i] != bos), end)
    return [*([] if bos is None else [bos]), *ids[start:end]]


def _no_second_bos(ids: list[int], bos: int | None, eos: int | None) -> list[int]:
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


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
