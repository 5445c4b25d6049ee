"""Weights of tokens in a loss, such that micro-batches and ranks add up to the whole."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_2d, check_bool, check_one_of

WEIGHT_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def token_weights(
    response_mask: Tensor,
    mode: str = "token-mean",
    *,
    num_tokens: float | Tensor | None = None,
    num_sequences: float | Tensor | None = None,
) -> Tensor:
    """Compute the weight of each token in the loss Σ w·l.

    token-mean: w = 1/N_tokens,  seq-mean-token-mean: w = 1/(N_seq·len_b),
    seq-mean-token-sum: w = 1/N_seq

    Give the counts of the whole minibatch (all micro-batches, all ranks), and the sums of their
    losses are the loss of the minibatch, exactly and in every mode.

    Args:
        response_mask: [B, T] bool, True = the token counts.
        mode: "token-mean", "seq-mean-token-mean" or "seq-mean-token-sum".
        num_tokens: N_tokens, a number or a 0-dim tensor. None: the count of this mask.
        num_sequences: N_seq, likewise. None: the rows of this mask with a token that counts.

    Returns:
        [B, T] float32, 0 where masked. In the first two modes the weights of a whole minibatch
        sum to 1. A mask without any token that counts gives zeros.

    Raises:
        ValueError: The shape is not [B, T], or `mode` is unknown.
        TypeError: `response_mask` is not bool.

    Source: token-mean against seq-mean: Yu et al. 2025, "DAPO", sec. 3.3,
    https://arxiv.org/abs/2503.14476.
    """
    check_one_of(WEIGHT_MODES, mode=mode)
    check_bool(response_mask=response_mask)
    check_2d(response_mask=response_mask)
    return reference.token_weights(
        response_mask, mode, num_tokens=num_tokens, num_sequences=num_sequences
    )
