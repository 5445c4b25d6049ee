"""Learning rates by optimiser step, on paper, and the same after a resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ppo.schedule import Kind, make_scheduler


def optimizer(lr: float = 1.0) -> AdamW:
    return AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr)


def advance(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[float]:
    """The rate that each optimiser step ran at."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
        ("constant", {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("constant", {"floor": 0.5}, [1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", {"floor": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("linear", {"warmup_steps": 1}, [0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        # cos(π/4) = 0.70711; beyond the end it stays, it does not turn up again
        ("cosine", {}, [1, 0.853553, 0.5, 0.146447, 0, 0, 0]),
        ("cosine", {"floor": 0.1}, [1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
        ("cosine", {"warmup_steps": 2, "floor": 0.1}, [1 / 3, 2 / 3, 1, 0.55, 0.1, 0.1]),
        ("linear", {"warmup_steps": 4}, [0.2, 0.4, 0.6, 0.8, 1, 0]),  # no step left to decay in
    ],
)
def test_four_steps_on_paper(kind: Kind, options: dict[str, Any], expected: list[float]) -> None:
    adam = optimizer(lr=2.0)
    rates = advance(adam, make_scheduler(adam, kind, 4, **options), len(expected))
    assert rates == pytest.approx([2 * factor for factor in expected], abs=2e-6)


def test_every_group_keeps_its_own_rate() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 0.1)]
    sgd = SGD(groups)
    advance(sgd, make_scheduler(sgd, "linear", 4), 1)
    assert [group["lr"] for group in sgd.param_groups] == pytest.approx([0.75, 0.075])


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resume_neither_steps_twice_nor_starts_over(optimizer_first: bool) -> None:
    whole = optimizer()
    rates = advance(whole, make_scheduler(whole, "linear", 10, warmup_steps=2), 10)

    stopped = optimizer()
    scheduler = make_scheduler(stopped, "linear", 10, warmup_steps=2)
    advance(stopped, scheduler, 5)
    saved = copy.deepcopy((stopped.state_dict(), scheduler.state_dict()))

    resumed = optimizer()
    going_on = make_scheduler(resumed, "linear", 10, warmup_steps=2)
    pairs = list(zip((resumed, going_on), saved, strict=True))
    for owner, state in pairs if optimizer_first else reversed(pairs):
        owner.load_state_dict(state)  # type: ignore[union-attr]
    assert going_on.last_epoch == 5
    assert advance(resumed, going_on, 5) == rates[5:]


def test_saved_at_half_of_a_linear_decay() -> None:
    stopped = optimizer(3e-4)
    scheduler = make_scheduler(stopped, "linear", 10)
    advance(stopped, scheduler, 5)
    resumed = optimizer(3e-4)
    going_on = make_scheduler(resumed, "linear", 10)
    resumed.load_state_dict(stopped.state_dict())
    going_on.load_state_dict(scheduler.state_dict())
    assert (going_on.last_epoch, resumed.param_groups[0]["lr"]) == (5, 1.5e-4)


def test_the_length_comes_from_the_settings_not_from_the_state() -> None:
    short = optimizer()
    scheduler = make_scheduler(short, "linear", 4)
    advance(short, scheduler, 2)
    longer = optimizer()
    going_on = make_scheduler(longer, "linear", 8)
    going_on.load_state_dict(scheduler.state_dict())
    going_on.step()
    assert longer.param_groups[0]["lr"] == pytest.approx(1 - 3 / 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "step"}, "kind must be 'constant', 'linear' or 'cosine', got 'step'"),
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"warmup_steps": 5}, "warmup_steps must be in [0, 4] (total_steps), got 5"),
        ({"warmup_steps": -1}, "warmup_steps must be in [0, 4] (total_steps), got -1"),
        ({"floor": -0.1}, "floor must be in [0, 1], got -0.1"),
        ({"floor": float("nan")}, "floor must be in [0, 1], got nan"),
    ],
)
def test_impossible_schedules_are_refused(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"kind": "linear", "total_steps": 4} | changes
    with pytest.raises(ValueError, match="must") as error:
        make_scheduler(optimizer(), **settings)
    assert str(error.value) == message
