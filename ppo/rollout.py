"""Sampling: prompts in, a `Rollout` out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ppo.batch import Rollout


@torch.no_grad()
def generate(
    actor: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    eos_ids: Sequence[int],
    pad_id: int,
) -> Rollout:
    """Sample one response for each prompt from softmax(logits/τ), the whole vocabulary kept.

    A response counts up to and including its first EOS; what comes after is padding.
    """
    sampling = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_ids),
        pad_token_id=pad_id,
        use_cache=True,
    )
    with _only(sampling, actor):
        sequences = cast(Any, actor).generate(
            input_ids=prompts, attention_mask=prompt_mask.long(), generation_config=sampling
        )
    return cut_at_eos(prompts, prompt_mask, sequences[:, prompts.shape[1] :], eos_ids, pad_id)


def cut_at_eos(
    prompts: Tensor, prompt_mask: Tensor, responses: Tensor, eos_ids: Sequence[int], pad_id: int
) -> Rollout:
    """Mask each response after its first EOS and pad what follows."""
    is_eos = torch.isin(responses, torch.tensor(list(eos_ids), device=responses.device))
    ended_before = is_eos.cumsum(1) - is_eos.long() > 0
    return Rollout(
        prompts=prompts,
        prompt_mask=prompt_mask,
        responses=responses.masked_fill(ended_before, pad_id),
        response_mask=~ended_before,
        finished=is_eos.any(1),
    )


@contextmanager
def _only(sampling: GenerationConfig, actor: PreTrainedModel) -> Iterator[None]:
    """Keep the model's own generation_config out of the sampling.

    transformers fills what a call leaves unset from the model's file (repetition penalties, forced
    tokens, processors), and then the sampled distribution is no longer the one that is trained.
    """
    own, training = actor.generation_config, actor.training
    actor.generation_config = sampling
    actor.eval()
    try:
        yield
    finally:
        actor.generation_config = own
        actor.train(training)
