"""What is measured: one short entry for each operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import baselines as base
import torch
from torch import Tensor

import ppo_kernels as ours
from ppo_kernels import reference

Shape = tuple[int, ...]
Make = Callable[..., Any]
LOGITS_GPU = [(4096, 32000), (8192, 128256), (8192, 151936), (32768, 32000)]
LOGITS_CPU = [(256, 32000), (128, 128256), (128, 151936)]
TOKENS_GPU = [(64, 256), (512, 1024), (512, 4096), (1024, 16384)]
TOKENS_CPU = [(64, 256), (128, 1024)]
LINEAR_GPU = [(4096, 32000, 1024), (8192, 128256, 4096), (8192, 151936, 8192)]
LINEAR_CPU = [(512, 32000, 256), (1024, 32000, 512)]


@dataclass(frozen=True)
class Op:
    """An operator: how it is called, on what, and what stands beside it.

    `call(x, f)` calls `f`, one of ours or of a baseline, with the inputs `x`; `impl` is passed to
    ours. `learn` are the inputs that get a gradient. `kind` says how inputs are drawn.
    """

    f: Make
    plain: Make
    kind: str
    call: Callable[..., Any]
    learn: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    gradient_in_forward: bool = False
    others: Mapping[str, Make] = field(default_factory=dict)
    peers: Mapping[str, base.Peer] = field(default_factory=dict)

    def shapes(self, device: str) -> list[Shape]:
        """Sizes for a device, small ones for a CPU."""
        on_gpu = {"logits": LOGITS_GPU, "tokens": TOKENS_GPU, "linear": LINEAR_GPU}
        on_cpu = {"logits": LOGITS_CPU, "tokens": TOKENS_CPU, "linear": LINEAR_CPU}
        return list((on_gpu if device == "cuda" else on_cpu)[self.kind])


def draw(op: Op, shape: Shape, device: str, *, dtype: torch.dtype, peaked: bool) -> dict[str, Any]:
    """Inputs of a shape: [N,V], [B,T] or (N,V,D); `peaked` logits have one likely token."""
    where: dict[str, Any] = {"device": device}
    if op.kind == "tokens":
        x = {name: torch.randn(shape, **where) * 0.5 for name in op.floats}
        lengths = torch.randint(shape[1] // 4, shape[1] + 1, (shape[0], 1), **where)
        return {
            **x,
            "mask": torch.arange(shape[1], **where) < lengths,
            "scores": torch.randn(shape[0], **where),
        }
    n, v = shape[:2]
    tokens = torch.randint(v, (n,), **where)
    per_token = {
        "tokens": tokens,
        "old": torch.randn(n, **where) * 0.1 - (0.0 if peaked else math.log(v) + 0.5),
        "advantages": torch.randn(n, **where),
        "mask": torch.ones(n, dtype=torch.bool, **where),
    }
    if op.kind == "linear":
        d = shape[2]
        weight = torch.randn(v, d, dtype=dtype, **where) * d**-0.5
        hidden = torch.randn(n, d, dtype=dtype, **where)
        if peaked:
            hidden += 5 * weight[tokens] * d**0.5
        return {"hidden": hidden, "weight": weight, "ref": torch.randn_like(hidden), **per_token}
    x = {name: torch.randn(n, v, dtype=dtype, **where) for name in op.floats}
    if peaked:
        for logits in x.values():
            logits[torch.arange(n, **where), tokens] += 12
    return {**x, **per_token}


def _policy(x: Any, f: Make, **k: Any) -> Any:
    return f(x["new"], x["old"], x["advantages"], x["mask"], **k)


def _value(x: Any, f: Make, **k: Any) -> Any:
    return f(x["values"], x["old"], x["returns"], x["mask"], **k)


def _ppo(x: Any, f: Make, **k: Any) -> Any:
    rest = (x["values"], x["old_values"], x["returns"], x["mask"])
    return f(x["new"], x["old"], x["advantages"], *rest, **k)


def _over_logits(x: Any, f: Make, **k: Any) -> Any:
    return f(x["logits"], x["tokens"], **k)


def _linear(x: Any, f: Make, **k: Any) -> Any:
    return f(x["hidden"], x["weight"], x["tokens"], **k)


def _linear_ppo(x: Any, f: Make, **k: Any) -> Any:
    rest = (x["old"], x["advantages"], x["mask"])
    return f(x["hidden"], x["weight"], x["tokens"], *rest, **k)


def _linear_kl(x: Any, f: Make, **k: Any) -> Any:
    return f(x["hidden"], x["weight"], x["ref"], x["weight"].detach(), **k)


def _gae(x: Any, f: Make, **k: Any) -> Any:
    return f(x["rewards"], x["values"], x["mask"], **k)


def _advantages(x: Any, f: Make, **k: Any) -> Any:
    return f(x["scores"], x["new"], x["ref"], x["values"], x["mask"], kl_coef=0.05, **k)


def _rewards(x: Any, f: Make, **k: Any) -> Any:
    return f(x["scores"], x["new"], x["ref"], x["mask"], kl_coef=0.05, **k)


OPS: dict[str, Op] = {
    "token_logprobs": Op(
        ours.token_logprobs, reference.token_logprobs, "logits", _over_logits,
        ("logits",), ("logits",),
        others={"logsumexp": base.logsumexp_gather, "cross entropy": base.cross_entropy},
        peers=base.LOGPROBS,
    ),
    "token_logprobs_and_entropy": Op(
        ours.token_logprobs_and_entropy, reference.token_logprobs_and_entropy, "logits",
        _over_logits, ("logits",), ("logits",),
    ),
    "categorical_kl": Op(
        ours.categorical_kl, reference.categorical_kl, "logits",
        lambda x, f, **k: f(x["logits"], x["ref"], **k), ("logits",), ("logits", "ref"),
    ),
    "kl_penalty": Op(
        ours.kl_penalty, reference.kl_penalty, "tokens",
        lambda x, f, **k: f(x["new"], x["ref"], estimator="k3", response_mask=x["mask"], **k),
        ("new",), ("new", "ref"),
    ),
    "token_rewards": Op(
        ours.token_rewards, reference.token_rewards, "tokens", _rewards, (), ("new", "ref")
    ),
    "gae": Op(
        ours.gae, reference.gae, "tokens", _gae, (), ("rewards", "values"),
        others={"loop": base.gae_loop}, peers=base.GAE,
    ),
    "ppo_advantages": Op(
        ours.ppo_advantages, reference.ppo_advantages, "tokens", _advantages, (),
        ("new", "ref", "values"),
    ),
    "whiten": Op(
        ours.whiten, reference.whiten, "tokens", lambda x, f, **k: f(x["new"], x["mask"], **k),
        (), ("new",), peers=base.WHITEN,
    ),
    "policy_loss": Op(
        ours.policy_loss, reference.policy_loss, "tokens", _policy, ("new",),
        ("new", "old", "advantages"), gradient_in_forward=True,
    ),
    "value_loss": Op(
        ours.value_loss, reference.value_loss, "tokens", _value, ("values",),
        ("values", "old", "returns"), gradient_in_forward=True,
    ),
    "ppo_loss": Op(
        ours.ppo_loss, reference.ppo_loss, "tokens", _ppo, ("new", "values"),
        ("new", "old", "advantages", "values", "old_values", "returns"), gradient_in_forward=True,
    ),
    "linear_token_logprobs": Op(
        ours.linear_token_logprobs, reference.linear_token_logprobs, "linear", _linear,
        ("hidden", "weight"), peers=base.LINEAR,
    ),
    "linear_ppo_loss": Op(
        ours.linear_ppo_loss, reference.linear_ppo_loss, "linear", _linear_ppo,
        ("hidden", "weight"), gradient_in_forward=True,
    ),
    "linear_categorical_kl": Op(
        ours.linear_categorical_kl, reference.linear_categorical_kl, "linear", _linear_kl,
        ("hidden",),
    ),
}  # fmt: skip


def tensors(result: Any) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if not isinstance(result, (tuple, list)):
        return []
    return [t for part in result for t in tensors(part)]


def floor_bytes(op: Op, x: Mapping[str, Any], outputs: list[Tensor], mode: str) -> int:
    """Each input once and each result once; backward also reads what it must have again.

    A loss that computes its gradients on the way has them as results of its forward pass.
    """
    used = _used(op, x)
    gradients = sum(x[name].nbytes for name in op.learn)
    forward = sum(t.nbytes for t in used) + sum(t.nbytes for t in outputs)
    if mode == "fwd":
        return forward
    backward = gradients + sum(t.nbytes for t in outputs if t.requires_grad)
    backward += gradients if op.gradient_in_forward else sum(t.nbytes for t in used)
    if mode == "bwd":
        return backward
    return forward + backward


def _used(op: Op, x: Mapping[str, Any]) -> list[Tensor]:
    """The inputs that a call reads."""
    seen: dict[str, Tensor] = {}

    class Watch(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            seen[key] = x[key]
            return x[key]

    op.call(Watch(x), lambda *_, **__: None)
    return list(seen.values())


def matmul_flops(op: Op, shape: Shape, mode: str) -> int | None:
    """Operations of the LM head's matmuls: the fewest that give the answer.

    2·N·V·D for the logits, as many for each gradient. The exact KL has two heads.
    """
    if op.kind != "linear":
        return None
    one = 2 * shape[0] * shape[1] * shape[2]
    forward = 2 * one if op.f is ours.linear_categorical_kl else one
    return {"fwd": forward, "bwd": len(op.learn) * one}.get(mode, forward + len(op.learn) * one)
