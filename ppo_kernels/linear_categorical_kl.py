"""The exact KL divergence between two LM heads, from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_same_device, check_shape
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._linear.checks import check_head, check_linear, matmul_dtype
from ppo_kernels._linear.divergence import linear_kl
from ppo_kernels._linear.rows import flat_hidden


def linear_categorical_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    response_mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute the KL divergence of the policy from the reference without ever holding all logits.

    KL_t = Σ_v π_v·(log π_v − log π_ref,v),  π = softmax(z_t), π_ref = softmax(z_ref,t),
    z as in `linear_token_logprobs`

    Two matmuls forward, four backward, a chunk of tokens at a time.

    Args:
        hidden: [..., D], floating: hidden states of the policy.
        weight: [V, D], the dtype of hidden: LM head of the policy.
        ref_hidden: [..., D_ref], floating: hidden states of the reference, no gradient.
        ref_weight: [V, D_ref], the dtype of ref_hidden: LM head of the reference, no gradient.
        bias: [V]. None: none.
        ref_bias: [V], no gradient. None: none.
        temperature: τ > 0, applied to both, and so are the next two.
        logit_scale: s > 0.
        logit_softcap: cap > 0. None: none.
        response_mask: [...] bool, True = the token counts. None: all.
        chunk_bytes: Size of a chunk of the policy's logits, with as much again for the
            reference; None as in `linear_token_logprobs`.
        impl: "auto", "triton", "torch" or "reference" (full logits).

    Returns:
        [...] float32 (float64 for float64 hidden), in nats, differentiable once in hidden, weight
        and bias. Positions that do not count are 0, with a gradient of exactly 0.

    Raises:
        ValueError: A shape, a device or a number is wrong.
        TypeError: A dtype is wrong, or hidden and ref_hidden differ in theirs outside autocast.

    Source: Kullback & Leibler 1951, https://doi.org/10.1214/aoms/1177729694; as a penalty of PPO
    in Schulman et al. 2017, eq. 8, https://arxiv.org/abs/1707.06347.
    """
    settings = check_linear(
        hidden, weight, bias, temperature, logit_scale, logit_softcap, chunk_bytes,
        response_mask=response_mask,
    )  # fmt: skip
    check_head(ref_hidden, ref_weight, ref_bias, "ref_")
    check_shape(hidden.shape[:-1], "hidden", **{"ref_hidden without D": ref_hidden[..., 0]})
    check_shape(weight.shape[:1], "V of weight", **{"V of ref_weight": ref_weight[:, 0]})
    check_same_device(hidden=hidden, ref_hidden=ref_hidden)
    if matmul_dtype(ref_hidden, ref_weight) != settings.dtype:
        raise TypeError(f"ref_hidden must be {hidden.dtype} (as hidden), got {ref_hidden.dtype}")
    chosen = resolve_impl(impl, hidden, ref_hidden)
    if chosen is Impl.REFERENCE:
        return reference.linear_categorical_kl(
            hidden, weight, ref_hidden, ref_weight, bias=bias, ref_bias=ref_bias,
            temperature=temperature, logit_scale=logit_scale, logit_softcap=logit_softcap,
            response_mask=response_mask,
        )  # fmt: skip
    shape = hidden.shape[:-1]
    counted = response_mask
    if counted is None:
        counted = torch.ones(shape, dtype=torch.bool, device=hidden.device)
    ref_bias = None if ref_bias is None else ref_bias.detach()
    kl: Tensor = linear_kl(
        flat_hidden(hidden), weight, bias, flat_hidden(ref_hidden.detach()), ref_weight.detach(),
        ref_bias, counted.flatten(), *settings, chosen.value,
    )[0]  # fmt: skip
    return kl.view(shape)
