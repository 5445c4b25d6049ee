"""Log-probabilities of given tokens, and the entropy of their distributions, from logits."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_inplace_backward, check_logits
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._torch import logits as torch_logits


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    response_mask: Tensor | None = None,
    inplace_backward: bool = False,
    impl: str = "auto",
) -> Tensor:
    """Compute the log-probability of each token under its row of logits.

    log π(a_t) = z_t[a_t] − logsumexp(z_t),  z_t = logits_t / τ

    The backward pass rebuilds softmax(z) from the saved logsumexp: per row 4 to 8 bytes are kept,
    and no second tensor of the logits' size exists besides their gradient.

    Args:
        logits: [..., V], any floating dtype, any strides. −inf bans a column (probability 0).
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        temperature: τ > 0. Use that of the sampler, or ratios do not start at 1.
        vocab_size: Columns from here on are padding and never read. None: V.
        response_mask: [...] bool, True = the token counts. None: all, save for `IGNORE_INDEX`.
        inplace_backward: Write the gradient into the logits' own memory. Whoever needs these
            logits after that fails with autograd's error about an in-place change.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        [...] float32 (float64 for float64 logits), in nats. Where a position does not count it
        is 0, whatever the row holds (NaN and inf too), and the row's gradient is 0. A banned
        token gives −inf; a row that is −inf everywhere gives NaN. Differentiable once.

    Raises:
        ValueError: A shape, `temperature` or `vocab_size` is wrong; a token that counts is no
            column (looked at on the CPU only: elsewhere that position becomes NaN);
            `inplace_backward` for a leaf, for expanded logits, or under `torch.compile`.
        TypeError: A dtype is wrong.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", π_θ(a_t|s_t) in
    eq. 6, https://arxiv.org/abs/1707.06347.
    """
    columns = check_logits(logits, temperature, vocab_size, response_mask, tokens=tokens)
    chosen = _resolve(impl, logits, inplace_backward)
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import logits as triton_logits

        return triton_logits.token_logprobs(
            logits, tokens, temperature, columns, response_mask, inplace_backward
        )
    if chosen is Impl.TORCH:
        return torch_logits.token_logprobs(
            logits, tokens, temperature, columns, response_mask, inplace_backward
        )
    return reference.token_logprobs(
        logits,
        tokens,
        temperature=temperature,
        vocab_size=columns,
        response_mask=response_mask,
    )


def token_logprobs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    response_mask: Tensor | None = None,
    inplace_backward: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute each token's log-probability and the entropy of its distribution, in one pass.

    log π(a_t) = z_t[a_t] − logsumexp(z_t),  H_t = −Σ_v π_v·log π_v,  z_t = logits_t / τ

    A column of probability 0 adds 0 to the entropy and gets no gradient from it. Everything else
    is as in `token_logprobs`.

    Args:
        logits: [..., V], any floating dtype, any strides. −inf bans a column (probability 0).
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        temperature: τ > 0; the entropy is that of the tempered distribution.
        vocab_size: Columns from here on are padding and never read. None: V.
        response_mask: [...] bool, True = the token counts. None: all, save for `IGNORE_INDEX`.
        inplace_backward: Write the gradient into the logits' own memory.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        (logprobs, entropy), each [...] float32 (float64 for float64 logits), in nats, both
        differentiable once; 0 where a position does not count.

    Raises:
        ValueError, TypeError: As in `token_logprobs`.

    Source: the entropy bonus S[π] of Schulman et al. 2017, eq. 9,
    https://arxiv.org/abs/1707.06347.
    """
    columns = check_logits(logits, temperature, vocab_size, response_mask, tokens=tokens)
    chosen = _resolve(impl, logits, inplace_backward)
    if chosen is Impl.TRITON:
        from ppo_kernels._triton import logits as triton_logits

        return triton_logits.token_logprobs_and_entropy(
            logits, tokens, temperature, columns, response_mask, inplace_backward
        )
    if chosen is Impl.TORCH:
        return torch_logits.token_logprobs_and_entropy(
            logits, tokens, temperature, columns, response_mask, inplace_backward
        )
    return reference.token_logprobs_and_entropy(
        logits,
        tokens,
        temperature=temperature,
        vocab_size=columns,
        response_mask=response_mask,
    )


def _resolve(impl: str, logits: Tensor, inplace_backward: bool) -> Impl:
    chosen = resolve_impl(impl, logits)
    if inplace_backward:
        check_inplace_backward(logits)
        if chosen is Impl.REFERENCE:
            raise ValueError("inplace_backward needs impl='triton' or impl='torch'")
    return chosen
