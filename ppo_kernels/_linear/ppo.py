"""The policy loss from hidden states, with its gradients: three matmuls.

Advantages and weights are known before the forward pass, so the gradient of a chunk is formed
while its logits are still there. The backward pass only multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._linear.head import Gradients, Head, Settings, Wanted, empty_gradients
from ppo_kernels._linear.rows import row_kernels
from ppo_kernels.outputs import PolicyLoss


@torch.library.custom_op("ppo_kernels::linear_ppo_loss", mutates_args=())
def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    temperature: float,
    logit_scale: float,
    logit_softcap: float | None,
    chunk_bytes: int | None,
    dtype: torch.dtype,
    cliprange: float,
    cliprange_high: float,
    dual_clip: float | None,
    entropy_coef: float,
    impl: str,
    hidden_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss; [9]: the policy's six, mean entropy, largest ratio, factor of the gradients; those.

    Tokens that do not count have a weight of 0. The gradients are those of loss/factor; for 16-bit
    ones the factor is the largest weight, as they would vanish beside weights of 1/10000.
    """
    settings = Settings(temperature, logit_scale, logit_softcap, chunk_bytes, dtype)
    wanted = Wanted(hidden_wanted, weight_wanted, bias_wanted)
    clip = (cliprange, cliprange_high, dual_clip)
    wide = _wide(dtype)
    unit_weights, factor = _unit_weights(weights, wide, scale=dtype.itemsize < 4)
    logprobs, entropy = hidden.new_zeros((2, len(hidden)), dtype=wide).unbind()
    rows = row_kernels(impl)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(weight, bias, settings)
        chunks = head.chunks(weights != 0, settings)
        totals = Gradients(hidden, weight, bias, chunks, wanted)
        for part, h, logits in head.logits(hidden, chunks, dtype):
            a, w, tau = tokens[part], unit_weights[part], head.temperature
            logprobs[part], h_pi, stats = rows.forward_rows(logits, a, tau, True)
            if h_pi is not None:
                entropy[part] = h_pi
            if not any(wanted):
                continue
            constants = (old_logprobs[part], advantages[part], w * head.slope)
            g_lp = rows.policy_gradient(logprobs[part], *constants, *clip)
            g_h = w * (-entropy_coef * head.slope) if entropy_coef else None
            tanh = head.remember(logits)
            rows.backward_rows_(logits, a, tau, stats, g_lp, g_h)
            head.pass_cap_(logits, tanh)
            totals.add(head, part, h, logits)
        gradients = totals.results()
    policy = _policy_loss(impl, logprobs, old_logprobs, advantages, weights, clip)
    bonus = (torch.where(weights != 0, unit_weights * entropy, 0).sum() * factor) * entropy_coef
    mean_entropy = torch.where(weights != 0, entropy, 0).sum() / policy.count.clamp(min=1)
    ratio_max = reference._ratio_max(logprobs, old_logprobs, weights != 0)
    numbers = torch.stack([*policy, mean_entropy, ratio_max, factor])
    return policy.loss - bonus, numbers, *gradients


@linear_ppo_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = _wide(next(x for x in others if isinstance(x, torch.dtype)))
    numbers = hidden.new_empty(9, dtype=wide)
    gradients = empty_gradients(hidden, weight, bias, Wanted(*others[-3:]))
    return hidden.new_empty((), dtype=wide), numbers, *gradients


def _unit_weights(weights: Tensor, dtype: torch.dtype, scale: bool) -> tuple[Tensor, Tensor]:
    """Weights, and the factor that was taken out of them: with `scale` they end at 1."""
    if weights.dtype == torch.bool:
        share = weights.sum().clamp(min=1).to(dtype).reciprocal()
        one = torch.ones_like(share)
        return (weights.to(dtype), share) if scale else (weights * share, one)
    weights = weights.to(dtype)
    if weights.numel() == 0 or not scale:
        return weights, weights.new_ones(())
    largest = weights.abs().amax()
    factor = torch.where(largest > 0, largest, 1)
    return weights / factor, factor


def _policy_loss(
    impl: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip: tuple[float, float, float | None],
) -> PolicyLoss:
    """The loss and its metrics over all tokens, from their log-probabilities."""
    if impl == "triton":
        from ppo_kernels._triton import losses as triton_losses

        new, old, a, w = (x[None] for x in (logprobs, old_logprobs, advantages, weights))
        return PolicyLoss(*triton_losses.policy_loss(new, old, a, w, *clip))
    return reference.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        weights,
        cliprange=clip[0],
        cliprange_high=clip[1],
        dual_clip=clip[2],
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, numbers, *gradients = output
    ctx.mark_non_differentiable(numbers, *gradients)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(numbers, *gradients)
    ctx.wanted, ctx.others = inputs[-3:], len(inputs) - 3


def _run_backward(ctx: Any, grad_loss: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_ppo_loss can be differentiated once only, not with create_graph=True; "
            "use impl='reference' for second derivatives"
        )
    results: list[Tensor | None] = [None] * 3
    if grad_loss is not None:
        numbers, *gradients = ctx.saved_tensors
        scale = grad_loss * numbers[-1]
        for i, (gradient, wanted) in enumerate(zip(gradients, ctx.wanted, strict=True)):
            results[i] = _scaled(gradient, scale) if wanted else None
    return *results, *[None] * ctx.others


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    # Where looking costs no wait, the usual factor of 1 makes no second copy of the gradients. A
    # tracer's stand-in is a subclass, and has no value.
    if type(gradient) is Tensor and scale.device.type == "cpu" and float(scale) == 1:
        return gradient
    return gradient * scale


torch.library.register_autograd(
    "ppo_kernels::linear_ppo_loss", _run_backward, setup_context=_setup_context
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
