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
from ppo.policy import position_ids
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
) -> Tensor:
    """Score prompt + response after encoding them with the reward model's own tokenizer."""
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    device = next(model.parameters()).device
    # encoders read the first token, or have absolute positions: their rows start at column 0
    ids, mask = (left_pad if hasattr(model, "score") else right_pad)(rows, pad_id)
    return score_tokens(model, ids.to(device), mask.to(device))


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
