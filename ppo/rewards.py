"""Scores: what the reward model says of a whole response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo.config import InputError
from ppo.data import left_pad
from ppo.heads import position_ids
from ppo.prompt_files import Message
from ppo.supervised import right_pad

Judge = Callable[[list[str], list[str]], Sequence[float]]


@torch.no_grad()
def score_tokens(model: PreTrainedModel, sequences: Tensor, attention_mask: Tensor) -> Tensor:
    """Score each row at its last attended token, [B] fp32.

    The index comes from the attention mask and not from the pad id, so an EOS that doubles as
    padding, or padding on the left, cannot shift it.
    """
    inputs = {
        "input_ids": sequences,
        "attention_mask": attention_mask.long(),
        **position_ids(model, attention_mask),
    }
    if not hasattr(model, "score"):  # encoders pool in a way of their own
        pooled: Tensor = model(**inputs).logits.float().squeeze(-1)
        return pooled
    hidden = model.base_model(**inputs).last_hidden_state
    columns = torch.arange(sequences.shape[1], device=sequences.device)
    last = (columns * attention_mask).argmax(1)
    rows = torch.arange(len(sequences), device=sequences.device)
    head = cast(nn.Module, model.score)
    scores: Tensor = head(hidden[rows, last]).float().squeeze(-1)
    return scores


def score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    messages: Sequence[Sequence[Message] | None] | None = None,
    finished: Sequence[bool] | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Score texts after encoding them with the reward model's own tokenizer, [B] fp32.

    Args:
        model: a sequence classifier with one label.
        tokenizer: its own.
        prompts: B texts.
        responses: B texts.
        messages: the chat messages of each prompt, None for plain text; where the tokenizer has a
            chat template, they are rendered with the response as the assistant's turn.
        finished: whether a response ended by itself: a plain text then ends with the tokenizer's
            EOS, as in training by `python -m ppo.reward_model`. None: no EOS.
        batch_size: texts in one forward pass; None: all.

    Raises:
        InputError: a text is longer than the model's positions.
    """
    rows = [
        _encode(
            tokenizer,
            prompt,
            response,
            messages[index] if messages else None,
            finished is not None and finished[index],
        )
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(range(len(rows)), key=lambda index: len(rows[index]), default=None)
    if limit and longest is not None and len(rows[longest]) > limit:
        raise InputError(
            f"sample {longest} of the batch has {len(rows[longest])} tokens for the reward model, "
            f"which takes {limit}"
        )
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    device = next(model.parameters()).device
    # encoders read the first token, or have absolute positions: their rows start at column 0
    pad = left_pad if hasattr(model, "score") else right_pad
    scores = []
    size = batch_size or max(1, len(rows))
    for start in range(0, len(rows), size):
        ids, mask = pad(rows[start : start + size], pad_id)
        scores.append(score_tokens(model, ids.to(device), mask.to(device)))
    return torch.cat(scores)


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    response: str,
    messages: Sequence[Message] | None,
    finished: bool,
) -> list[int]:
    if messages is not None and tokenizer.chat_template:
        turns = [*map(dict, messages), {"role": "assistant", "content": response}]
        if messages and messages[-1]["role"] == "assistant":  # the response goes on with that turn
            joined = str(messages[-1]["content"]) + response
            turns = [*map(dict, messages[:-1]), {"role": "assistant", "content": joined}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(prompt + response)["input_ids"])
    eos = tokenizer.eos_token_id
    return [*ids, eos] if finished and eos is not None and ids[-1:] != [eos] else ids


def load_function(spec: str, key: str) -> Judge:
    """Import `module:function`."""
    module, _, name = spec.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{key}: cannot import {spec!r} (expected module:function): {error}"
        ) from None
    if not callable(function):
        raise InputError(f"{key}: {spec!r} is not a function")
    return function  # type: ignore[no-any-return]
