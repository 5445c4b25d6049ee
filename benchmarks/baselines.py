"""What people would use instead: plain PyTorch, and other packages where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Peer(NamedTuple):
    """A function of another package: where it is, and how it takes our inputs."""

    module: str
    name: str
    adapt: Callable[[Any], Callable[..., Any]] = lambda function: function

    def load(self) -> Callable[..., Any]:
        """Import it.

        Raises:
            ImportError: the package, or this function of it, is not there.
        """
        found: Any = import_module(self.module)
        for part in self.name.split("."):
            if not hasattr(found, part):
                raise ImportError(f"{self.module} has no {self.name}")
            found = getattr(found, part)
        return self.adapt(found)


def logsumexp_gather(logits: Tensor, tokens: Tensor) -> Tensor:
    """Row by row, so that one row's logits are in float32 at a time; the trainers' usual form."""
    rows = [
        logits[i, tokens[i]].float() - logits[i].float().logsumexp(-1) for i in range(len(logits))
    ]
    return torch.stack(rows)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """PyTorch's own fused form."""
    return -F.cross_entropy(logits.float(), tokens, reduction="none")


def gae_loop(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """The sequential loop over time of all trainers, on responses without holes."""
    advantages, last, after = [], torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    m = mask.to(values.dtype)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        last = (delta + gamma * gae_lambda * last) * m[:, t]
        after = values[:, t] * m[:, t]
        advantages.append(last)
    found = torch.stack(advantages[::-1], dim=1)
    return found, (found + values) * m


def _verl_gae(function: Any) -> Callable[..., Any]:
    def call(rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Any:
        return function(rewards, values, mask.float(), gamma=1.0, lam=0.95)

    return call


def _torchrl_gae(function: Any) -> Callable[..., Any]:
    def call(rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Any:
        done = torch.zeros_like(mask[..., None])
        done[:, -1] = True
        after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        three = (values[..., None], after[..., None], rewards[..., None])
        return function(1.0, 0.95, *three, done, done)

    return call


def _liger_linear(layer: Any) -> Callable[..., Any]:
    loss = layer(reduction="sum")
    return lambda hidden, weight, tokens, **_: loss(weight, hidden, tokens)


LOGPROBS: Mapping[str, Peer] = {
    "trl": Peer("trl.trainer.utils", "selective_log_softmax"),
    "verl": Peer("verl.utils.torch_functional", "logprobs_from_logits"),
    "liger": Peer(
        "liger_kernel.transformers.functional",
        "liger_cross_entropy",
        lambda f: lambda z, a, **_: -f(z, a, reduction="none"),
    ),
}
GAE: Mapping[str, Peer] = {
    "verl": Peer("verl.trainer.ppo.core_algos", "compute_gae_advantage_return", _verl_gae),
    "torchrl": Peer(
        "torchrl.objectives.value.functional",
        "vec_generalized_advantage_estimate",
        _torchrl_gae,
    ),
}
WHITEN: Mapping[str, Peer] = {
    "verl": Peer("verl.utils.torch_functional", "masked_whiten"),
}
LINEAR: Mapping[str, Peer] = {
    "liger": Peer("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss", _liger_linear),
    "cut_cross_entropy": Peer(
        "cut_cross_entropy",
        "linear_cross_entropy",
        lambda f: lambda hidden, weight, tokens, **_: -f(hidden, weight, tokens, reduction="none"),
    ),
}
