"""The exact KL divergence between two distributions over the vocabulary, from logits."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_logits
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._torch import logits as torch_logits


def categorical_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    response_mask: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute the KL divergence of the policy from the reference over the whole vocabulary.

    KL_t = Σ_v π_v·(log π_v − log π_ref,v),  π = softmax(logits_t/τ),
    π_ref = softmax(ref_logits_t/τ)

    Exact where `kl_penalty` estimates from the sampled token; one pass over both logits.

    Args:
        logits: [..., V], any floating dtype, any strides: the policy π.
        ref_logits: [..., V] (its V may differ when `vocab_size` is given): π_ref, no gradient.
        temperature: τ > 0, applied to both.
        vocab_size: Columns from here on are padding and never read. None: V.
        response_mask: [...] bool, True = the token counts. None: all.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        [...] float32 (float64 for float64 logits), in nats, differentiable once in `logits`. A
        column that π bans adds 0, even where π_ref bans it too; one that only π_ref bans makes
        it +inf. Positions that do not count are 0, with a zero gradient, whatever they hold.

    Raises:
        ValueError: A shape, `temperature` or `vocab_size` is wrong.
        TypeError: A dtype is wrong.

    Source: Kullback & Leibler 1951, https://doi.org/10.1214/aoms/1177729694; as a penalty of PPO
    in Schulman et al. 2017, eq. 8, https://arxiv.org/abs/1707.06347.
    """
    columns = check_logits(logits, temperature, vocab_size, response_mask, ref_logits=ref_logits)
    chosen = resolve_impl(impl, logits, ref_logits)
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import logits as triton_logits

        return triton_logits.categorical_kl(logits, ref_logits, temperature, columns, response_mask)
    if chosen is Impl.TORCH:
        return torch_logits.categorical_kl(logits, ref_logits, temperature, columns, response_mask)
    return reference.categorical_kl(
        logits,
        ref_logits,
        temperature=temperature,
        vocab_size=columns,
        response_mask=response_mask,
    )
