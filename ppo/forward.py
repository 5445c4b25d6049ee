"""What actor, reference and critic say of a batch, on response positions only."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ppo.batch import Minibatch, Rollout
from ppo.policy import Objective, causal_inputs
from ppo_kernels import LinearPPOLoss


def response_logprobs(
    policy: nn.Module, batch: Rollout | Minibatch, *, temperature: float, impl: str
) -> Tensor:
    """log π(a_t | s_t) of the response tokens, [B,T] fp32, 0 where the mask is False."""
    logprobs, _ = policy(*_tokens(batch), temperature=temperature, with_entropy=False, impl=impl)
    return logprobs  # type: ignore[no-any-return]


def response_logprobs_and_entropy(
    policy: nn.Module, batch: Rollout | Minibatch, *, temperature: float, impl: str
) -> tuple[Tensor, Tensor]:
    """The log-probabilities, and the entropy of the distribution that each token came from."""
    logprobs, entropy = policy(
        *_tokens(batch), temperature=temperature, with_entropy=True, impl=impl
    )
    return logprobs, entropy


def response_policy_loss(
    policy: nn.Module,
    batch: Rollout | Minibatch,
    objective: Objective,
    *,
    temperature: float,
    impl: str,
) -> LinearPPOLoss:
    """The clipped policy loss, entropy bonus included, with its diagnostics."""
    loss: LinearPPOLoss = policy(
        *_tokens(batch), temperature=temperature, impl=impl, objective=objective
    )
    return loss


def response_values(critic: nn.Module, batch: Rollout | Minibatch) -> Tensor:
    """V(s_t) before each response token is chosen, [B,T] fp32, 0 where the mask is False."""
    inner: Any = getattr(critic, "module", critic)
    values: Tensor = critic(**causal_inputs(inner.trunk, *_tokens(batch)))
    prompt, response = batch.prompts.shape[1], batch.responses.shape[1]
    values = values[:, prompt - 1 : prompt + response - 1]
    return values.masked_fill(~batch.response_mask, 0.0)


def _tokens(batch: Rollout | Minibatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.prompts, batch.prompt_mask, batch.responses, batch.response_mask
