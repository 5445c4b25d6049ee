"""The assertion that all numerical tests lean on."""

import math

import pytest
import torch

from ppo_kernels.testing import assert_within_error_budget

ORACLE = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def test_twice_the_error_of_the_baseline_is_allowed_and_more_is_not():
    baseline = (ORACLE + torch.tensor([0.0, 0.125, 0.0])).float()
    assert_within_error_budget((ORACLE + 0.25).float(), ORACLE, baseline)
    with pytest.raises(AssertionError, match=r"2\.500e-01 = 2 · 1\.250e-01 \(baseline\)") as caught:
        assert_within_error_budget(
            (ORACLE + torch.tensor([0, 0, -0.26])).float(), ORACLE, baseline, tiny=0.0
        )
    assert "1 of 3 elements, worst at [2]: got 3.74" in str(caught.value)
    assert_within_error_budget((ORACLE + 0.26).float(), ORACLE, baseline, factor=3)


def test_an_exact_baseline_leaves_a_few_roundings():
    off = ORACLE.float()
    off[2] += 4 * 1.1920929e-07 * 4
    assert_within_error_budget(off, ORACLE, ORACLE.float())
    with pytest.raises(AssertionError, match="error over the budget"):
        assert_within_error_budget(off, ORACLE, ORACLE.float(), tiny=0.0)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_numbers_have_to_be_in_the_same_places(special):
    with_special = ORACLE.clone()
    with_special[1] = special
    assert_within_error_budget(with_special.float(), with_special, with_special.float())
    for actual, oracle in ((ORACLE, with_special), (with_special, ORACLE), (-with_special, ORACLE)):
        with pytest.raises(AssertionError, match=r"not finite in the same places.*worst at \[1\]"):
            assert_within_error_budget(actual.float(), oracle, oracle.float())


def test_the_sign_of_infinity_matters():
    inf = torch.tensor([math.inf], dtype=torch.float64)
    with pytest.raises(AssertionError, match="got -inf, want inf"):
        assert_within_error_budget(-inf.float(), inf, inf.float())


def test_a_nan_in_the_baseline_is_no_licence():
    baseline = torch.tensor([math.nan, 2.0, 4.0])
    with pytest.raises(AssertionError, match="error over the budget"):
        assert_within_error_budget((ORACLE + 1).float(), ORACLE, baseline)


def test_place_in_more_dimensions():
    oracle = torch.zeros(2, 3, dtype=torch.float64)
    actual = oracle.float()
    actual[1, 2] = 5
    with pytest.raises(AssertionError, match=r"1 of 6 elements, worst at \[1, 2\]: got 5\.0"):
        assert_within_error_budget(actual, oracle, oracle.float())


def test_scalars_and_empty_tensors():
    assert_within_error_budget(torch.tensor(1.0), ORACLE[0], torch.tensor(1.0))
    with pytest.raises(AssertionError, match=r"worst at \[\]"):
        assert_within_error_budget(torch.tensor(2.0), ORACLE[0], torch.tensor(1.0))
    assert_within_error_budget(torch.zeros(0), ORACLE[:0], torch.zeros(0))


def test_misuse():
    with pytest.raises(TypeError, match=r"oracle64 must be torch\.float64, got torch\.float32"):
        assert_within_error_budget(ORACLE, ORACLE.float(), ORACLE)
    with pytest.raises(AssertionError, match=r"actual has shape \[2\], oracle64 \[3\]"):
        assert_within_error_budget(ORACLE[:2], ORACLE, ORACLE)
