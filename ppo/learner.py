"""Models that train, each with its optimiser and learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo.config import OptimConfig
from ppo.schedule import make_scheduler


@dataclass(frozen=True)
class Learner:
    """A role that trains: the module that is called, what of it this role moves, and how."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    optimizer: Optimizer
    scheduler: LRScheduler
    on_actor: bool = False
    """Whether this is a value head that reads the actor's hidden states."""


def make_learner(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    learning_rate: float,
    optim: OptimConfig,
    total_steps: int,
    *,
    on_actor: bool = False,
) -> Learner:
    """AdamW over these parameters; ε = 1e-5 as in the reference PPO implementations."""
    optimizer = AdamW(
        parameters,
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
    return Learner(model, parameters, optimizer, scheduler, on_actor)


def clip_gradients(
    learners: Sequence[Learner], optim: OptimConfig, accelerator: Accelerator
) -> list[Tensor]:
    """Scale gradients down to `max_grad_norm`; returns the norm of each learner's before."""
    if optim.clip_jointly:
        grads = [[p.grad for p in each.parameters if p.grad is not None] for each in learners]
        norms = [nn.utils.get_total_norm(each) for each in grads]
        together = [parameter for each in learners for parameter in each.parameters]
        accelerator.clip_grad_norm_(together, optim.max_grad_norm)
        return norms
    return [
        torch.as_tensor(accelerator.clip_grad_norm_(each.parameters, optim.max_grad_norm))
        for each in learners
    ]


def take_step(learners: Sequence[Learner]) -> None:
    """Step each optimiser and its learning rate."""
    for learner in learners:
        learner.optimizer.step()
        learner.scheduler.step()


def forget_gradients(*learners: Learner | None) -> None:
    for learner in learners:
        if learner is not None:
            learner.optimizer.zero_grad(set_to_none=True)
