"""A causal LM as PPO sees it: what it says of response tokens, without logits.

Where the logits are a linear map of the last hidden state, decoder and LM head are called apart:
the head meets response positions only, in chunks, and the [B,T,V] logits never exist. A model that
does something else with its logits keeps them; `Policy` finds out when it is made.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo.adapters import activate, role_parameters, save_adapter
from ppo.heads import causal_inputs, decoder, find_head, head_parameters, save_head
from ppo.objective import Objective, kl_term
from ppo.packing import pack, packed_states, padded_states
from ppo_kernels import (
    LinearPPOLoss,
    categorical_kl,
    linear_categorical_kl,
    linear_ppo_loss,
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
    policy_loss,
    token_logprobs,
    token_logprobs_and_entropy,
)


class PolicyOutput(NamedTuple):
    """What was asked for; the rest is None."""

    logprobs: Tensor | None = None  # [B,T] fp32: log π(a_t|s_t), 0 where the mask is False
    entropy: Tensor | None = None  # [B,T] fp32: H_t
    loss: LinearPPOLoss | None = None
    kl_term: Tensor | None = None  # Σ w_t·ρ_t·Δ_t, as the loss has it
    kl: Tensor | None = None  # [B,T] fp32: exact KL from the other policy
    values: Tensor | None = None  # [B,T+1] fp32: V before each token and after the last


class States(NamedTuple):
    """Hidden states or logits before each response token."""

    hidden: Tensor | None  # [B,T,D]
    logits: Tensor | None  # [B,T,V]
    all_hidden: Tensor | None  # [B,T+1,D]: the state after the last token as well


class Policy(nn.Module):
    """A causal LM whose forward pass returns what PPO asks of response tokens.

    A module of its own, so that wrappers for several devices see every parameter's use.

    Args:
        model: the causal LM, PEFT adapters included.
        adapter: which adapter of the model this policy is; see `adapters.activate`.
        value_head: V(s) = head(h(s)) on the policy's own hidden states (`models.sharing: trunk`).
        value_gradient: whether the value loss may move the policy through those states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        adapter: str | None = None,
        value_head: nn.Linear | None = None,
        value_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.adapter = adapter
        self.value_head = value_head
        self.value_gradient = value_gradient
        activate(model, adapter)
        self.head, self.why_logits = find_head(model)
        self.packed = False

    def pack(self) -> str | None:
        """Leave padding out from now on, or say why it stays."""
        trunk = cast(PreTrainedModel, decoder(self.model))
        why = "its logits are made in full" if self.head is None else pack(trunk)
        self.packed = why is None
        return why

    def forward(
        self,
        prompts: Tensor,
        prompt_mask: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        temperature: float,
        impl: str,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        with_values: bool = False,
        objective: Objective | None = None,
        against: Policy | None = None,
    ) -> PolicyOutput:
        """Return log-probabilities, and what else is asked for; with an objective, its loss.

        From hidden states the loss takes three matmuls with the head's weight, where
        log-probabilities and then their gradient take four. `against` is the reference of the
        exact KL.
        """
        tokens = (prompts, prompt_mask, responses, response_mask)
        how: dict[str, Any] = {"temperature": temperature, "impl": impl}
        other = None
        if against is not None:
            with torch.no_grad():
                other = against.states(*tokens)
        states = self.states(*tokens, with_values=with_values)
        kl = None
        if against is not None and other is not None:
            kl = self._exact_kl(states, against, other, response_mask, how)
        values = None
        if self.value_head is not None and states.all_hidden is not None:
            hidden = states.all_hidden if self.value_gradient else states.all_hidden.detach()
            values = self.value_head(hidden).squeeze(-1).float()
        if not (with_logprobs or objective):
            return PolicyOutput(kl=kl, values=values)
        ask = self._of_hidden if states.hidden is not None else _of_logits
        source = cast(Tensor, states.logits if states.hidden is None else states.hidden)
        found = ask(source, responses, response_mask, with_entropy, objective, how)
        return found._replace(kl=kl, values=values)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the actor's optimiser moves: not those of a value head."""
        if self.adapter is not None:
            return role_parameters(self.model, self.adapter)
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save_pretrained(self, folder: Path) -> None:
        """Write an ordinary model folder, or the adapter; a value head goes beside it."""
        if self.adapter is not None:
            save_adapter(self.model, self.adapter, folder)
        else:
            self.model.save_pretrained(folder)
        if self.value_head is not None:
            save_head(self.value_head, folder)

    def states(
        self,
        prompts: Tensor,
        prompt_mask: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        *,
        with_values: bool = False,
    ) -> States:
        """Run the decoder, and where there is no linear head, the whole model."""
        activate(self.model, self.adapter)
        tokens = (prompts, prompt_mask, responses, response_mask)
        first, width = prompts.shape[1] - 1, responses.shape[1]
        if self.head is not None:
            run = packed_states if self.packed else padded_states
            states = run(decoder(self.model), tokens)
            return States(states[:, :width], None, states if with_values else None)
        inputs = causal_inputs(self.model, *tokens)
        keep = torch.arange(first, first + width, device=prompts.device)
        output = self.model(**inputs, logits_to_keep=keep, output_hidden_states=with_values)
        hidden = output.hidden_states[-1][:, first:] if with_values else None
        return States(None, output.logits, hidden)

    def _of_hidden(
        self,
        hidden: Tensor,
        responses: Tensor,
        response_mask: Tensor,
        with_entropy: bool,
        objective: Objective | None,
        how: dict[str, Any],
    ) -> PolicyOutput:
        weight, bias = head_parameters(self.model)
        how = {**how, "bias": bias, **asdict(cast(Any, self.head))}
        if objective is not None and objective.ref_logprobs is None:
            coef = {"entropy_coef": objective.entropy_coef}
            settings = {**objective.clipped, **coef, **how}
            return PolicyOutput(loss=linear_ppo_loss(hidden, weight, responses, **settings))
        how["response_mask"] = response_mask
        entropy = None
        if with_entropy or (objective is not None and objective.entropy_coef):
            logprobs, entropy = linear_token_logprobs_and_entropy(hidden, weight, responses, **how)
        else:
            logprobs = linear_token_logprobs(hidden, weight, responses, **how)
        if objective is None:
            return PolicyOutput(logprobs, entropy)
        return _loss(logprobs, entropy, objective, how["impl"])

    def _exact_kl(
        self,
        states: States,
        against: Policy,
        other: States,
        response_mask: Tensor,
        how: dict[str, Any],
    ) -> Tensor:
        how = {**how, "response_mask": response_mask}
        if states.hidden is not None and other.hidden is not None and self.head == against.head:
            weight, bias = head_parameters(self.model)
            ref_weight, ref_bias = head_parameters(against.model)
            return linear_categorical_kl(
                states.hidden,
                weight,
                other.hidden,
                ref_weight.detach(),
                bias=bias,
                ref_bias=ref_bias,
                **asdict(cast(Any, self.head)),
                **how,
            )
        return categorical_kl(self._logits(states), against._logits(other), **how)

    def _logits(self, states: States) -> Tensor:
        if states.logits is not None:
            return states.logits
        weight, bias = head_parameters(self.model)
        head = cast(Any, self.head)
        logits: Tensor = (
            nn.functional.linear(cast(Tensor, states.hidden), weight, bias) * head.logit_scale
        )
        cap = head.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _of_logits(
    logits: Tensor,
    responses: Tensor,
    response_mask: Tensor,
    with_entropy: bool,
    objective: Objective | None,
    how: dict[str, Any],
) -> PolicyOutput:
    # the gradient may take the logits' memory: nobody else needs them
    inplace = logits.requires_grad and not torch.compiler.is_compiling()
    how = {**how, "response_mask": response_mask, "inplace_backward": inplace}
    entropy_coef = objective.entropy_coef if objective else 0.0
    entropy = None
    if with_entropy or entropy_coef:
        logprobs, entropy = token_logprobs_and_entropy(logits, responses, **how)
    else:
        logprobs = token_logprobs(logits, responses, **how)
    if objective is None:
        return PolicyOutput(logprobs, entropy)
    return _loss(logprobs, entropy, objective, how["impl"])


def _loss(
    logprobs: Tensor, entropy: Tensor | None, objective: Objective, impl: str
) -> PolicyOutput:
    """Loss of log-probabilities; `linear_ppo_loss` has the same without the KL term."""
    policy = policy_loss(logprobs, **objective.clipped, impl=impl)
    bonus = logprobs.new_zeros(()) if entropy is None else (objective.weights * entropy).sum()
    loss, kl = policy.loss - objective.entropy_coef * bonus, None
    if objective.ref_logprobs is not None:
        kl = kl_term(logprobs, objective)
        loss = loss + objective.kl_coef * kl
        kl = kl.detach()
    log_ratio = (logprobs.detach() - objective.old_logprobs)[objective.weights != 0]
    largest = log_ratio.amax().clamp(max=40.0).exp() if len(log_ratio) else bonus.detach() * 0
    found = LinearPPOLoss(
        loss=loss,
        policy=policy._replace(loss=policy.loss.detach()),
        entropy=bonus.detach(),
        ratio_max=largest,
    )
    return PolicyOutput(loss=found, kl_term=kl)
