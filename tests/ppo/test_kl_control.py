"""The KL coefficient: both rules by hand, and what would break them later is refused at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ppo.kl_control import KLController


@pytest.mark.parametrize(
    ("kl", "expected"),
    [  # 0.2·(1 + clip(KL/6 − 1, ±0.2)·256/10000): errors 0.2 (of 1), −0.2 (of −0.5), 0.1, 0
        (12, 0.201024),
        (3, 0.198976),
        (6.6, 0.200512),
        (6, 0.2),
        (-1, 0.198976),  # k1 of few samples can be negative
    ],
)
def test_the_proportional_rule_on_paper(kl: float, expected: float) -> None:
    controller = KLController(0.2, "proportional", target=6, horizon=10_000)
    assert controller.updated(kl, 256).kl_coef == pytest.approx(expected, rel=1e-12)


def test_a_short_horizon_on_paper() -> None:
    controller = KLController(0.1, "proportional", target=1, horizon=100)
    assert controller.updated(5, 10).kl_coef == pytest.approx(0.102)  # 0.1·(1 + 0.2·10/100)


@pytest.mark.parametrize(
    ("kl", "expected"),
    # of target 6: the upper limit is 9, the lower 4; the limits themselves change nothing
    [(9.01, 0.4), (9.0, 0.2), (6.0, 0.2), (4.0, 0.2), (3.99, 0.1), (-1.0, 0.1)],
)
def test_the_rule_of_the_ppo_paper_doubles_and_halves(kl: float, expected: float) -> None:
    assert KLController(0.2, "ppo_paper", target=6).updated(kl, 256).kl_coef == expected


def test_fixed_stays_whatever_the_kl() -> None:
    controller = KLController(0.2, target=6)
    for kl in (12.0, 12.0, 0.0, math.nan):
        controller = controller.updated(kl, 256)
    assert controller.kl_coef == 0.2


@pytest.mark.parametrize("kind", ["proportional", "ppo_paper"])
def test_a_saved_coefficient_goes_on_bit_for_bit(kind: str) -> None:
    start = KLController(0.2, kind, target=6)  # type: ignore[arg-type]
    stopped = start.updated(9.5, 64).updated(7, 64)
    resumed = replace(start, kl_coef=float(repr(stopped.kl_coef)))  # as through a JSON file
    assert resumed.updated(3, 64) == stopped.updated(3, 64)
    assert resumed.updated(3, 64).kl_coef != start.updated(3, 64).kl_coef


def test_the_coefficient_never_reaches_zero_where_no_rule_could_leave_it() -> None:
    controller = KLController(0.2, "ppo_paper", target=6)
    for _ in range(1100):  # 2^−1074 is the last power of two above 0
        controller = controller.updated(0, 64)
    assert controller.updated(10, 64).kl_coef > controller.kl_coef > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0}, "target must be positive and finite, got 0"),
        ({"target": -1}, "target must be positive and finite, got -1"),
        ({"target": math.nan}, "target must be positive and finite, got nan"),
        ({"horizon": 0}, "horizon must be positive and finite, got 0"),
        ({"horizon": -1}, "horizon must be positive and finite, got -1"),
        ({"horizon": math.inf}, "horizon must be positive and finite, got inf"),
        ({"kl_coef": -0.1}, "kl_coef must be finite and not negative, got -0.1"),
        ({"kl_coef": math.nan}, "kl_coef must be finite and not negative, got nan"),
        ({"kl_coef": 0}, "kl_coef must be positive for kind 'proportional', got 0: it stays 0"),
        ({"kind": "pid"}, "kind must be 'fixed', 'proportional' or 'ppo_paper', got 'pid'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    settings = {"kl_coef": 0.2, "kind": "proportional"} | changes
    with pytest.raises(ValueError, match="must") as error:
        KLController(**settings)  # type: ignore[arg-type]
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("kl", "count", "message"),
    [
        (math.nan, 10, "kl must be finite, got nan"),
        (math.inf, 10, "kl must be finite, got inf"),
        (1.0, 0, "count must be positive, got 0"),
        (
            5.0,  # at e = −0.2, β would become 0.2·(1 − 0.2·500/100) = 0
            500,
            (
                "horizon must be greater than 0.2 x the 500 sequences of a rollout, got 100: "
                "kl_coef could turn negative"
            ),
        ),
    ],
)
def test_measurements_that_would_spoil_it_are_refused(kl: float, count: int, message: str) -> None:
    controller = KLController(0.2, "proportional", target=1, horizon=100)
    with pytest.raises(ValueError, match="must") as error:
        controller.updated(kl, count)
    assert str(error.value) == message


def test_zero_is_a_coefficient_that_stays() -> None:
    assert KLController(0.0).updated(100, 64).kl_coef == 0
