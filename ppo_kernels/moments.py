"""Count, mean and sum of squared deviations under a mask, in a form that ranks can add."""

from __future__ import annotations

from torch import Tensor

from ppo_kernels import reference
from ppo_kernels._checks import check_bool, check_floating, check_same_device, check_shape
from ppo_kernels._dispatch import Impl, as_2d, resolve_impl


def masked_moments(x: Tensor, mask: Tensor, *, impl: str = "auto") -> Tensor:
    """Compute count, mean and sum of squared deviations of what counts.

    n = Σ m,  μ = Σ m·x / n,  M₂ = Σ m·(x − μ)²

    Args:
        x: any shape, floating.
        mask: same shape, bool, True = the token counts.
        impl: "auto", "triton", "torch" or "reference".

    Returns:
        [3]: n, μ, M₂; float32 (float64 for float64 x), without gradient; all 0 when nothing
        counts. Masked positions have no effect, whatever they hold; NaN where one counts stays.

    Raises:
        ValueError: Shapes differ.
        TypeError: A dtype is wrong.

    Source: Chan, Golub & LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """
    check_floating(x=x)
    check_bool(mask=mask)
    check_shape(x.shape, "as x", mask=mask)
    check_same_device(x=x, mask=mask)
    if resolve_impl(impl, x) is Impl.TRITON:
        from ppo_kernels._triton import whiten as triton_whiten

        return triton_whiten.masked_moments(*as_2d(x, mask))
    return reference.masked_moments(x, mask)


def combine_moments(moments: Tensor) -> Tensor:
    """Combine the moments of parts into those of the whole.

    n = Σ nᵢ,  μ = Σ nᵢ·μᵢ / n,  M₂ = Σ M₂ᵢ + Σ nᵢ·(μᵢ − μ)²

    Args:
        moments: [R, 3] floating, one row of `masked_moments` per rank or micro-batch.

    Returns:
        [3], same dtype: the moments of all parts together. Parts of count 0 are neutral.

    Raises:
        ValueError: The shape is not [R, 3].
        TypeError: The dtype is not floating.

    Source: Chan, Golub & LeVeque 1979, eq. 2.1, for any number of parts,
    http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
    """
    check_floating(moments=moments)
    if moments.dim() != 2 or moments.shape[1] != 3:
        raise ValueError(f"moments must have shape [R, 3], got {list(moments.shape)}")
    return reference.combine_moments(moments)
