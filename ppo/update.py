"""The update phase: clipped PPO steps over minibatches of one rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo.batch import Minibatch, split
from ppo.config import OptimConfig, PPOConfig
from ppo.forward import response_policy_loss, response_values
from ppo.policy import Objective
from ppo.schedule import make_scheduler
from ppo_kernels import PPOLoss, ValueLoss, token_weights, value_loss


@dataclass(frozen=True)
class Learner:
    """A model that trains, with its optimiser."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


def make_learner(
    model: nn.Module, learning_rate: float, optim: OptimConfig, total_steps: int
) -> Learner:
    """AdamW over what trains; ε = 1e-5 as in the reference PPO implementations."""
    optimizer = AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=learning_rate,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    scheduler = make_scheduler(
        optimizer,
        optim.lr_schedule,
        total_steps,
        warmup_steps=optim.warmup_steps,
        floor=optim.lr_floor,
    )
    return Learner(model, optimizer, scheduler)


@dataclass(frozen=True)
class UpdateStats:
    """What one optimiser step saw, over the whole minibatch."""

    loss: PPOLoss
    actor_grad_norm: Tensor
    critic_grad_norm: Tensor | None


def update(
    actor: Learner,
    critic: Learner | None,
    batch: Minibatch,
    ppo: PPOConfig,
    *,
    temperature: float,
    max_grad_norm: float,
    generator: torch.Generator,
    accelerator: Accelerator,
    impl: str,
) -> Iterator[UpdateStats]:
    """Take `ppo_epochs` x `num_minibatches` optimiser steps, yielding the figures of each.

    Once the approximate KL of a minibatch is past `target_kl`, this step and all that would follow
    on this rollout are left out: the policy is too far from the one that sampled it.
    """
    for _ in range(ppo.ppo_epochs):
        for minibatch in batch.shuffled(ppo.num_minibatches, generator):
            weights = token_weights(minibatch.response_mask, ppo.loss_agg_mode)
            parts = []
            for rows, micro in split(minibatch, ppo.micro_batch_size):
                micro_loss, part = _loss(
                    actor.model,
                    critic.model if critic else None,
                    micro,
                    weights[rows],
                    ppo,
                    temperature,
                    impl,
                )
                accelerator.backward(micro_loss)
                parts.append(part)
            loss = add_up(parts)
            if ppo.target_kl is not None and not loss.policy.approx_kl <= ppo.target_kl:
                for learner in filter(None, (actor, critic)):
                    learner.optimizer.zero_grad(set_to_none=True)
                return
            yield UpdateStats(
                loss=loss,
                actor_grad_norm=_step(actor, max_grad_norm, accelerator),
                critic_grad_norm=_step(critic, max_grad_norm, accelerator) if critic else None,
            )


def _loss(
    actor: nn.Module,
    critic: nn.Module | None,
    micro: Minibatch,
    weights: Tensor,
    ppo: PPOConfig,
    temperature: float,
    impl: str,
) -> tuple[Tensor, PPOLoss]:
    """L = L_policy + c_vf·L_value − c_H·Σ w·H of one micro-batch; no L_value without a critic."""
    objective = Objective(
        micro.old_logprobs,
        micro.advantages,
        weights,
        cliprange=ppo.cliprange,
        cliprange_high=ppo.cliprange_high,
        dual_clip=ppo.dual_clip,
        entropy_coef=ppo.entropy_coef,
    )
    policy = response_policy_loss(actor, micro, objective, temperature=temperature, impl=impl)
    if critic is None:
        zero = torch.zeros_like(policy.loss.detach())
        return policy.loss, PPOLoss(policy.loss, policy.policy, ValueLoss(zero, zero, zero))
    value = value_loss(
        response_values(critic, micro),
        micro.old_values,
        micro.returns,
        weights,
        cliprange_value=ppo.cliprange_value,
        impl=impl,
    )
    loss = policy.loss + ppo.vf_coef * value.loss
    return loss, PPOLoss(loss, policy.policy, value._replace(loss=value.loss.detach()))


def _step(learner: Learner, max_grad_norm: float, accelerator: Accelerator) -> Tensor:
    norm = accelerator.clip_grad_norm_(learner.model.parameters(), max_grad_norm)
    learner.optimizer.step()
    learner.scheduler.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return torch.as_tensor(norm)


def add_up(parts: list[PPOLoss]) -> PPOLoss:
    """Losses of micro-batches add (their weights sum to 1 over the minibatch); token means combine
    by token count, and variances by Chan's rule."""
    policies, values = [part.policy for part in parts], [part.value for part in parts]
    count = torch.stack([policy.count for policy in policies])
    share = count / count.sum().clamp(min=1)

    def mean(figures: list[Tensor]) -> Tensor:
        return (torch.stack(figures) * share).sum()

    ratio_mean = mean([policy.ratio_mean for policy in policies])
    ratio_var = mean(
        [policy.ratio_var + (policy.ratio_mean - ratio_mean).square() for policy in policies]
    )
    return PPOLoss(
        loss=torch.stack([part.loss.detach() for part in parts]).sum(),
        policy=policies[0]._replace(
            loss=torch.stack([policy.loss for policy in policies]).sum(),
            clipfrac=mean([policy.clipfrac for policy in policies]),
            approx_kl=mean([policy.approx_kl for policy in policies]),
            ratio_mean=ratio_mean,
            ratio_var=ratio_var,
            count=count.sum(),
        ),
        value=values[0]._replace(
            loss=torch.stack([value.loss for value in values]).sum(),
            clipfrac=mean([value.clipfrac for value in values]),
            count=count.sum(),
        ),
    )
