"""Forward passes of the four models over prompts and responses, on response positions only."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ppo.batch import Minibatch, Rollout
from ppo_kernels import token_logprobs, token_logprobs_and_entropy


def position_ids(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """Positions that count from each row's first real token, where the model takes them."""
    inner = getattr(model, "module", model)
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(1) - 1).clamp(min=0)}


def _inputs(model: nn.Module, batch: Rollout | Minibatch) -> dict[str, Tensor]:
    attention_mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1)
    return {
        "input_ids": torch.cat([batch.prompts, batch.responses], dim=1),
        "attention_mask": attention_mask.long(),
        **position_ids(model, attention_mask),
        "use_cache": False,  # type: ignore[dict-item]
    }


def response_logits(model: nn.Module, batch: Rollout | Minibatch) -> Tensor:
    """Logits that score the response tokens, [B,T,V]: no other position meets the LM head."""
    prompt, response = batch.prompts.shape[1], batch.responses.shape[1]
    keep = torch.arange(prompt - 1, prompt + response - 1, device=batch.prompts.device)
    logits: Tensor = model(**_inputs(model, batch), logits_to_keep=keep).logits
    return logits


def response_logprobs(
    model: nn.Module, batch: Rollout | Minibatch, *, temperature: float, impl: str
) -> Tensor:
    """log π(a_t | s_t) of the response tokens, [B,T] fp32, 0 where the mask is False."""
    logits = response_logits(model, batch)
    return token_logprobs(
        logits,
        batch.responses,
        temperature=temperature,
        response_mask=batch.response_mask,
        inplace_backward=torch.is_grad_enabled(),
        impl=impl,
    )


def response_logprobs_and_entropy(
    model: nn.Module, batch: Rollout | Minibatch, *, temperature: float, impl: str
) -> tuple[Tensor, Tensor]:
    """The log-probabilities, and the entropy of the distribution that each token came from."""
    logits = response_logits(model, batch)
    return token_logprobs_and_entropy(
        logits,
        batch.responses,
        temperature=temperature,
        response_mask=batch.response_mask,
        inplace_backward=torch.is_grad_enabled(),
        impl=impl,
    )


def response_values(critic: nn.Module, batch: Rollout | Minibatch) -> Tensor:
    """V(s_t) before each response token is chosen, [B,T] fp32, 0 where the mask is False."""
    inner: Any = getattr(critic, "module", critic)
    values: Tensor = critic(**_inputs(inner.trunk, batch))
    prompt, response = batch.prompts.shape[1], batch.responses.shape[1]
    values = values[:, prompt - 1 : prompt + response - 1]
    return values.masked_fill(~batch.response_mask, 0.0)
