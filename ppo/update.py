"""The update phase: clipped PPO steps over minibatches of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ppo.batch import Minibatch, split
from ppo.config import InputError, OptimConfig, PPOConfig
from ppo.forward import ask, state_values, values_of_tokens
from ppo.learner import Learner, clip_gradients, forget_gradients, take_step
from ppo.objective import Objective
from ppo_kernels import PolicyLoss, ValueLoss, token_weights, value_loss


@dataclass(frozen=True)
class Extras:
    """Parts of the loss beyond clipped policy and value loss; each may be off."""

    kl_coef: float = 0.0
    """β of the KL in the loss."""
    reference: nn.Module | None = None
    """The policy of the exact KL; None: the KL is estimated from the sampled tokens."""
    supervised: Callable[[int], Tensor] | None = None
    """Weighted loss on examples, by the number of responses in the minibatch (PPO-ptx)."""


class Losses(NamedTuple):
    """Figures of one micro-batch or of a whole minibatch; None for what does not train."""

    policy: PolicyLoss | None
    value: ValueLoss | None
    kl: Tensor | None
    """KL term of the loss, Σ w_t·kl_t."""
    ratio_max: Tensor | None


@dataclass(frozen=True)
class UpdateStats:
    """What one optimiser step saw, over the whole minibatch."""

    policy: PolicyLoss | None
    value: ValueLoss | None
    kl: Tensor | None
    ratio_max: Tensor | None
    supervised: Tensor | None
    actor_grad_norm: Tensor | None
    critic_grad_norm: Tensor | None


def update(
    actor: Learner,
    critic: Learner | None,
    batch: Minibatch,
    ppo: PPOConfig,
    optim: OptimConfig,
    *,
    temperature: float,
    generator: torch.Generator,
    accelerator: Accelerator,
    impl: str,
    train_actor: bool = True,
    extras: Extras | None = None,
    skip_bad_steps: bool = False,
    packed: bool = False,
) -> Iterator[UpdateStats]:
    """Take `ppo_epochs` x `num_minibatches` optimiser steps, yielding the figures of each.

    A step whose gradient has NaN or infinity is never taken: it raises BadNumbers, or with
    `skip_bad_steps` is left out and yields figures that are all None.

    Once the approximate KL of a minibatch is past `target_kl`, this step and all that would follow
    on this rollout are left out: the policy is too far from the one that sampled it.
    """
    extras = extras or Extras()
    how = {"temperature": temperature, "impl": impl}
    learners = [*([actor] if train_actor else []), *([critic] if critic else [])]
    for _ in range(ppo.ppo_epochs):
        for minibatch in batch.shuffled(ppo.num_minibatches, generator):
            weights = token_weights(minibatch.response_mask, ppo.loss_agg_mode)
            losses = add_up(
                [
                    _backward(
                        actor if train_actor else None,
                        critic,
                        micro,
                        weights[rows.to(weights.device), : micro.responses.shape[1]],
                        ppo,
                        extras,
                        accelerator,
                        how,
                    )
                    for rows, micro in split(
                        minibatch, ppo.micro_batch_size, ppo.micro_batch_tokens, packed=packed
                    )
                ]
            )
            if _too_far(losses.policy, ppo.target_kl):
                forget_gradients(actor, critic)
                return
            supervised = None
            if train_actor and extras.supervised is not None:
                supervised = extras.supervised(len(minibatch))
                accelerator.backward(supervised)
                supervised = supervised.detach()
            norms = clip_gradients(learners, optim, accelerator)
            if not all(norm.isfinite() for norm in norms):
                what = bad_numbers(losses, learners)
                forget_gradients(actor, critic)
                if not skip_bad_steps:
                    raise BadNumbers(what, minibatch)
                yield UpdateStats(*[None] * 7)
                continue
            take_step(learners)
            forget_gradients(actor, critic)
            yield UpdateStats(
                *losses,
                supervised=supervised,
                actor_grad_norm=norms[0] if train_actor else None,
                critic_grad_norm=norms[-1] if critic else None,
            )


class BadNumbers(InputError):
    """A gradient that is not finite, before the step that it would have spoilt."""

    def __init__(self, what: str, minibatch: Minibatch) -> None:
        super().__init__(f"{what} is not finite; the step was not taken")
        self.minibatch = minibatch


def bad_numbers(losses: Losses, learners: Sequence[Learner]) -> str:
    """Name the first tensor that is not finite: a loss, else a gradient."""
    for name, part in (("loss of the policy", losses.policy), ("value loss", losses.value)):
        if part is not None and not part.loss.isfinite():
            return f"the {name}"
    for learner in learners:
        own = {id(parameter) for parameter in learner.parameters}
        for name, parameter in learner.model.named_parameters():
            gradient = parameter.grad
            if id(parameter) in own and gradient is not None and not gradient.isfinite().all():
                return f"the gradient of {name}"
    return "the norm of the gradients"


def _too_far(policy: PolicyLoss | None, target_kl: float | None) -> bool:
    # `not <=`: NaN is too far as well
    return policy is not None and target_kl is not None and not policy.approx_kl <= target_kl


def _backward(
    actor: Learner | None,
    critic: Learner | None,
    micro: Minibatch,
    weights: Tensor,
    ppo: PPOConfig,
    extras: Extras,
    accelerator: Accelerator,
    how: dict[str, Any],
) -> Losses:
    """Add the gradient of one micro-batch:

    L = L_policy − c_H·Σ w·H + β·Σ w·kl + c_vf·L_value

    Each model's part goes back before the next model runs, so that the activations of one are in
    memory at a time; a value head on the actor has its part in the actor's pass.
    """
    policy = value = kl = ratio_max = all_values = None
    parts: list[Tensor] = []
    on_actor = critic is not None and critic.on_actor
    if actor is not None:
        objective = _objective(micro, weights, ppo, extras)
        out = ask(
            actor.model,
            micro,
            objective=objective,
            with_values=on_actor,
            against=extras.reference,
            **how,
        )
        assert out.loss is not None
        parts, policy, kl = [out.loss.loss], out.loss.policy, out.kl_term
        ratio_max = out.loss.ratio_max
        if out.kl is not None:
            exact = (weights * out.kl).sum()
            parts.append(extras.kl_coef * exact)
            kl = exact.detach()
        all_values = out.values
    elif on_actor:
        assert critic is not None
        out = ask(critic.model, micro, with_logprobs=False, with_values=True, **how)
        all_values = out.values
    if parts and not on_actor:
        accelerator.backward(_sum(parts))
        parts = []
    if critic is not None:
        if all_values is None:
            all_values = state_values(critic.model, micro)
        value = value_loss(
            values_of_tokens(all_values, micro),
            micro.old_values,
            micro.returns,
            weights,
            cliprange_value=ppo.cliprange_value,
            impl=how["impl"],
        )
        accelerator.backward(_sum([*parts, ppo.vf_coef * value.loss]))
        value = value._replace(loss=value.loss.detach())
    return Losses(policy, value, kl, ratio_max)


def _objective(micro: Minibatch, weights: Tensor, ppo: PPOConfig, extras: Extras) -> Objective:
    sampled_kl = extras.kl_coef != 0 and extras.reference is None
    return Objective(
        micro.old_logprobs,
        micro.advantages,
        weights,
        cliprange=ppo.cliprange,
        cliprange_high=ppo.cliprange_high,
        dual_clip=ppo.dual_clip,
        entropy_coef=ppo.entropy_coef,
        ref_logprobs=micro.ref_logprobs if sampled_kl else None,
        kl_coef=extras.kl_coef,
    )


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()


def add_up(parts: Sequence[Losses]) -> Losses:
    """Losses of micro-batches add (their weights sum to 1 over the minibatch); token means combine
    by token count, and variances by Chan's rule."""
    policies = [part.policy for part in parts if part.policy is not None]
    values = [part.value for part in parts if part.value is not None]
    kls = [part.kl for part in parts if part.kl is not None]
    ratios = [part.ratio_max for part in parts if part.ratio_max is not None]
    return Losses(
        _policies(policies) if policies else None,
        _values(values) if values else None,
        _sum(kls) if kls else None,
        torch.stack(ratios).amax() if ratios else None,
    )


def _policies(parts: Sequence[PolicyLoss]) -> PolicyLoss:
    count = torch.stack([part.count for part in parts])
    ratio_mean = _mean([part.ratio_mean for part in parts], count)
    spread = [part.ratio_var + (part.ratio_mean - ratio_mean).square() for part in parts]
    return parts[0]._replace(
        loss=_sum([part.loss.detach() for part in parts]),
        clipfrac=_mean([part.clipfrac for part in parts], count),
        approx_kl=_mean([part.approx_kl for part in parts], count),
        ratio_mean=ratio_mean,
        ratio_var=_mean(spread, count),
        count=count.sum(),
    )


def _values(parts: Sequence[ValueLoss]) -> ValueLoss:
    count = torch.stack([part.count for part in parts])
    return parts[0]._replace(
        loss=_sum([part.loss for part in parts]),
        clipfrac=_mean([part.clipfrac for part in parts], count),
        count=count.sum(),
    )


def _mean(figures: Sequence[Tensor], count: Tensor) -> Tensor:
    return (torch.stack(list(figures)) * (count / count.sum().clamp(min=1))).sum()
