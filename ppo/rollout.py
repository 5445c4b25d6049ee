"""Sampling: prompts in, a `Rollout` out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ppo.batch import Rollout


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; a response ends with one of `eos_ids` or a stop string."""

    max_new_tokens: int
    temperature: float
    eos_ids: Sequence[int]
    pad_id: int
    min_new_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    stop_strings: Sequence[str] = ()


def sampling_warning(sampling: Sampling) -> str | None:
    """What a person should know where the sampled distribution is not the trained one."""
    causes = [
        name
        for name, is_on in (
            ("top_k", sampling.top_k > 0),
            ("top_p", sampling.top_p < 1),
            ("min_new_tokens", sampling.min_new_tokens > 0),
        )
        if is_on
    ]
    if not causes:
        return None
    return (
        f"rollout.{', rollout.'.join(causes)}: responses come from a narrower distribution than "
        "the one whose probabilities are trained, so ratios, KL and entropy are biased"
    )


@torch.no_grad()
def generate(
    actor: PreTrainedModel,
    prompts: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Rollout:
    """Sample one response for each prompt from softmax(logits/τ), by default all of it.

    A response counts up to and including its first EOS, or the token that completes a stop string;
    what comes after is padding.

    Args:
        actor: the causal LM.
        prompts: [B,P] int64, left-padded.
        prompt_mask: [B,P] bool.
        sampling: the settings; the model's own `generation_config` has no say.
        tokenizer: needed for stop strings.
    """
    settings = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        eos_token_id=list(sampling.eos_ids),
        pad_token_id=sampling.pad_id,
        use_cache=True,
    )
    stops: dict[str, Any] = {}
    if sampling.stop_strings:
        assert tokenizer is not None
        stop = _StopStrings(tokenizer, sampling, prompts.shape[1])
        stops["stopping_criteria"] = StoppingCriteriaList([stop])
    with _only(settings, actor):
        sequences = cast(Any, actor).generate(
            input_ids=prompts,
            attention_mask=prompt_mask.long(),
            generation_config=settings,
            **stops,
        )
    responses = sequences[:, prompts.shape[1] :]
    ends = None
    if sampling.stop_strings:
        assert tokenizer is not None
        ends = stop_positions(tokenizer, responses, sampling)
    return cut_at_eos(prompts, prompt_mask, responses, sampling.eos_ids, sampling.pad_id, ends)


def stop_positions(
    tokenizer: PreTrainedTokenizerBase, responses: Tensor, sampling: Sampling
) -> Tensor:
    """True at the token of each response that completes a stop string first, [B,T] bool.

    The text is decoded token by token, because a stop string may begin and end within tokens.
    """
    ends = torch.zeros_like(responses, dtype=torch.bool)
    for row, ids in enumerate(responses.tolist()):
        for count in range(max(1, sampling.min_new_tokens), len(ids) + 1):
            text = tokenizer.decode(ids[:count], skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop_strings):
                ends[row, count - 1] = True
                break
    return ends


class _StopStrings(StoppingCriteria):
    """Ends rows whose new text holds a stop string."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, prompt_length: int
    ) -> None:
        self.tokenizer, self.sampling, self.prompt_length = tokenizer, sampling, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        new = input_ids[:, self.prompt_length :]
        if new.shape[1] < self.sampling.min_new_tokens:
            return torch.zeros(len(new), dtype=torch.bool, device=new.device)
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        stops = self.sampling.stop_strings
        found = [any(stop in text for stop in stops) for text in texts]
        return torch.tensor(found, device=new.device)


def cut_at_eos(
    prompts: Tensor,
    prompt_mask: Tensor,
    responses: Tensor,
    eos_ids: Sequence[int],
    pad_id: int,
    ends: Tensor | None = None,
) -> Rollout:
    """Mask each response after its first EOS, or after where `ends` is True, and pad the rest."""
    is_end = torch.isin(responses, torch.tensor(list(eos_ids), device=responses.device))
    if ends is not None:
        is_end = is_end | ends
    ended_before = is_end.cumsum(1) - is_end.long() > 0
    return Rollout(
        prompts=prompts,
        prompt_mask=prompt_mask,
        responses=responses.masked_fill(ended_before, pad_id),
        response_mask=~ended_before,
        finished=is_end.any(1),
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
