"""What actor, reference and critic say of a batch, on response positions only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ppo.batch import Minibatch, Rollout
from ppo.policy import PolicyOutput


def ask(policy: nn.Module, batch: Rollout | Minibatch, **wanted: Any) -> PolicyOutput:
    """Run a `Policy`, or a wrapper of one, on the tokens of a batch; see its `forward`."""
    output: PolicyOutput = policy(*_tokens(batch), **wanted)
    return output


def response_logprobs(
    policy: nn.Module, batch: Rollout | Minibatch, *, temperature: float, impl: str
) -> Tensor:
    """log π(a_t | s_t) of the response tokens, [B,T] fp32, 0 where the mask is False."""
    logprobs = ask(policy, batch, temperature=temperature, impl=impl).logprobs
    assert logprobs is not None
    return logprobs


def state_values(critic: nn.Module, batch: Rollout | Minibatch) -> Tensor:
    """V before each response token, and after the last column: [B,T+1] fp32, nothing masked."""
    values: Tensor = critic(*_tokens(batch))
    return values


def values_of_tokens(values: Tensor, batch: Rollout | Minibatch) -> Tensor:
    """V(s_t) before each response token is chosen, [B,T], 0 where the mask is False."""
    return values[:, :-1].masked_fill(~batch.response_mask, 0.0)


def values_after(values: Tensor, batch: Rollout | Minibatch) -> Tensor:
    """V of the state after the last response token that counts, [B]."""
    columns = torch.arange(1, values.shape[1], device=values.device)
    last = (columns * batch.response_mask).amax(1, keepdim=True)
    return values.gather(1, last).squeeze(1)


def response_values(critic: nn.Module, batch: Rollout | Minibatch) -> Tensor:
    """V(s_t) of a critic that is a model of its own, [B,T] fp32, 0 where the mask is False."""
    return values_of_tokens(state_values(critic, batch), batch)


def _tokens(batch: Rollout | Minibatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.prompts, batch.prompt_mask, batch.responses, batch.response_mask
