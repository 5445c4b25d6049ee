"""All per-token numbers of PPO that come from logits, in one read of them."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_logits
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._torch import logits as torch_logits
from ppo_kernels.outputs import TokenStatistics


def token_statistics(
    logits: Tensor,
    ref_logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    response_mask: Tensor | None = None,
    impl: str = "auto",
) -> TokenStatistics:
    """Compute log-probabilities under policy and reference, entropy and exact KL at once.

    log π(a_t),  H_t = −Σ_v π_v·log π_v,  KL_t = Σ_v π_v·(log π_v − log π_ref,v),  log π_ref(a_t)

    Args:
        logits: [..., V], any floating dtype, any strides: the policy π = softmax(logits/τ).
        ref_logits: [..., V] (its V may differ when `vocab_size` is given): π_ref, no gradient.
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        temperature: τ > 0, applied to both.
        vocab_size: Columns from here on are padding and never read. None: V.
        response_mask: [...] bool, True = the token counts. None: all, save for `IGNORE_INDEX`.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        TokenStatistics(logprobs, entropy, kl, ref_logprobs), each [...] float32 (float64 for
        float64 logits), 0 where a position does not count. The first three are differentiable
        once in `logits`. Special cases are those of `token_logprobs` and `categorical_kl`.

    Raises:
        ValueError, TypeError: As in `token_logprobs` and `categorical_kl`.

    Source: Schulman et al. 2017, eqs. 6, 8 and 9, https://arxiv.org/abs/1707.06347.
    """
    columns = check_logits(
        logits, temperature, vocab_size, response_mask, tokens=tokens, ref_logits=ref_logits
    )
    chosen = resolve_impl(impl, logits, ref_logits)
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import logits as triton_logits

        return TokenStatistics(
            *triton_logits.token_statistics(
                logits, ref_logits, tokens, temperature, columns, response_mask
            )
        )
    if chosen is Impl.TORCH:
        return TokenStatistics(
            *torch_logits.token_statistics(
                logits, ref_logits, tokens, temperature, columns, response_mask
            )
        )
    return reference.token_statistics(
        logits,
        ref_logits,
        tokens,
        temperature=temperature,
        vocab_size=columns,
        response_mask=response_mask,
    )
