"""Log-probabilities of given tokens, and entropies, from hidden states and the LM head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_tokens
from ppo_kernels._dispatch import Impl, resolve_impl
from ppo_kernels._linear.checks import check_linear
from ppo_kernels._linear.head import Settings
from ppo_kernels._linear.logprobs import linear_logprobs
from ppo_kernels._linear.parallel import ShardedLogprobs
from ppo_kernels._linear.rows import flat_hidden, ignore, kept_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    response_mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    impl: str = "auto",
) -> Tensor:
    """Compute the log-probability of each token without ever holding all logits.

    log π(a_t) = z_t[a_t] − logsumexp(z_t),  x_t = s·(W·h_t + b),
    z_t = x_t/τ, or cap·tanh(x_t/cap)/τ with a softcap

    One matmul forward, three backward (logits are computed again), a chunk of tokens at a time.
    Beyond the gradients there is one chunk of logits (two with a softcap, in the backward pass),
    and for 16-bit weights and more than one chunk the weight gradient in float32. Nothing is
    computed or allocated for an input that needs no gradient.

    Args:
        hidden: [..., D], floating: h_t, the last hidden state that predicts token t.
        weight: [V, D], the dtype of hidden, any strides: W. Slice off padding rows.
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        bias: [V], b. None: none.
        temperature: τ > 0.
        logit_scale: s > 0.
        logit_softcap: cap > 0. None: none.
        response_mask: [...] bool, True = the token counts. None: all, save for `IGNORE_INDEX`.
        chunk_bytes: Size of a chunk of logits, in their dtype; at least one row. None: 64 MiB on
            a CPU; elsewhere 1 GiB, or 2048 rows if these are more. With None, the logits of up to
            3 chunks on a CPU and 1 elsewhere wait for the backward pass, which makes the others
            again; with a size, none do.
        process_group: The ranks that share the vocabulary; None: one rank has all of it. Every
            rank passes the same hidden and tokens and its own rows of weight and bias, and gets
            the same result and gradient of hidden. Not under `torch.compile`.
        vocab_start: The token id of this rank's first row of weight.
        impl: "auto", "triton", "torch" or "reference" (full logits, one rank).

    Returns:
        [...] float32 (float64 for float64 hidden), in nats, differentiable once in hidden, weight
        and bias. Where a position does not count it is 0, its hidden state is not used (NaN may
        be there), and the gradient is exactly 0. On a CPU such positions cost no matmul. Under
        autocast the matmuls run in its dtype, as in `F.linear`; gradients stay in the dtype of
        their tensor, that of a float32 weight without a rounding to 16 bits.

    Raises:
        ValueError: A shape, a device, a number or `process_group` is wrong; a token that counts
            is not in [0, V) (looked at on the CPU only: elsewhere that position becomes NaN).
        TypeError: A dtype is wrong.

    Source: Schulman et al. 2017, π_θ(a_t|s_t) in eq. 6, https://arxiv.org/abs/1707.06347; the
    softcap is that of Gemma 2, section 2, https://arxiv.org/abs/2408.00118.
    """
    shared = {"tokens": tokens, "response_mask": response_mask}
    settings = check_linear(
        hidden, weight, bias, temperature, logit_scale, logit_softcap, chunk_bytes, **shared
    )
    chosen = _resolve(impl, hidden, weight, process_group, vocab_start)
    check_tokens(tokens, _columns(weight, process_group), response_mask)
    if chosen is not Impl.REFERENCE:
        inputs, group = (hidden, weight, bias), process_group
        tokens = ignore(tokens, response_mask)
        return _compute(inputs, tokens, settings, False, chosen, group, vocab_start)[0]
    return reference.linear_token_logprobs(
        hidden,
        weight,
        tokens,
        bias=bias,
        temperature=temperature,
        response_mask=response_mask,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )


def linear_token_logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    response_mask: Tensor | None = None,
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_start: int = 0,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies without ever holding all logits.

    log π(a_t) = z_t[a_t] − logsumexp(z_t),  H_t = −Σ_v π_v·log π_v

    Logits z, cost and memory are those of `linear_token_logprobs`; the entropy needs no matmul.

    Args:
        hidden: [..., D], floating: h_t, the last hidden state that predicts token t.
        weight: [V, D], the dtype of hidden, any strides: W. Slice off padding rows.
        tokens: [...] int64, a_t. `IGNORE_INDEX` (−100): the position does not count.
        bias: [V], b. None: none.
        temperature: τ > 0; the entropy is that of the tempered distribution.
        logit_scale: s > 0.
        logit_softcap: cap > 0. None: none.
        response_mask: [...] bool, True = the token counts. None: all, save for `IGNORE_INDEX`.
        chunk_bytes: Size of a chunk of logits; None as in `linear_token_logprobs`.
        process_group: The ranks that share the vocabulary; None: one rank has all of it.
        vocab_start: The token id of this rank's first row of weight.
        impl: "auto", "triton", "torch" or "reference" (full logits, one rank).

    Returns:
        (logprobs, entropy), each [...] float32 (float64 for float64 hidden), in nats, both
        differentiable once; 0 where a position does not count, with a gradient of exactly 0.

    Raises:
        ValueError, TypeError: As in `linear_token_logprobs`.

    Source: the entropy bonus S[π] of Schulman et al. 2017, eq. 9,
    https://arxiv.org/abs/1707.06347.
    """
    shared = {"tokens": tokens, "response_mask": response_mask}
    settings = check_linear(
        hidden, weight, bias, temperature, logit_scale, logit_softcap, chunk_bytes, **shared
    )
    chosen = _resolve(impl, hidden, weight, process_group, vocab_start)
    check_tokens(tokens, _columns(weight, process_group), response_mask)
    if chosen is not Impl.REFERENCE:
        inputs, group = (hidden, weight, bias), process_group
        tokens = ignore(tokens, response_mask)
        return _compute(inputs, tokens, settings, True, chosen, group, vocab_start)
    return reference.linear_token_logprobs_and_entropy(
        hidden,
        weight,
        tokens,
        bias=bias,
        temperature=temperature,
        response_mask=response_mask,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )


def _columns(weight: Tensor, group: ProcessGroup | None) -> int:
    """How many tokens there are, as far as one rank can know."""
    return len(weight) if group is None else torch.iinfo(torch.int64).max


def _resolve(
    impl: str, hidden: Tensor, weight: Tensor, group: ProcessGroup | None, vocab_start: int
) -> Impl:
    chosen = resolve_impl(impl, hidden, weight)
    if group is None and vocab_start != 0:
        raise ValueError(f"vocab_start must be 0 without process_group, got {vocab_start}")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be at least 0, got {vocab_start}")
    if group is not None and chosen is Impl.REFERENCE:
        raise ValueError("process_group needs impl='triton' or impl='torch'")
    if group is not None and torch.compiler.is_compiling():
        raise ValueError("process_group must be None under torch.compile")
    return chosen


def _keep(inputs: tuple[Tensor, Tensor, Tensor | None], settings: Settings) -> int:
    """Rows of logits to keep for the backward pass: none without one, or in a size that is set."""
    will_differentiate = any(x is not None and x.requires_grad for x in inputs)
    if not (will_differentiate and torch.is_grad_enabled()) or settings.chunk_bytes is not None:
        return 0
    hidden, weight, _ = inputs
    rows = hidden.numel() // max(1, hidden.shape[-1])
    return kept_rows(rows, len(weight) * settings.dtype.itemsize, hidden.device)


def _compute(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    tokens: Tensor,
    settings: Settings,
    with_entropy: bool,
    impl: Impl,
    group: ProcessGroup | None,
    vocab_start: int,
) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = inputs
    arguments = (flat_hidden(hidden), weight, bias, tokens.flatten())
    results: tuple[Tensor, ...]
    if group is None:
        keep = _keep(inputs, settings)
        results = linear_logprobs(*arguments, *settings, with_entropy, impl.value, keep)
    else:
        results = ShardedLogprobs.apply(
            *arguments, settings, with_entropy, impl.value, group, vocab_start
        )  # type: ignore[no-untyped-call]
    logprobs = results[0].view(tokens.shape)
    return logprobs, results[1].view(tokens.shape) if with_entropy else logprobs
