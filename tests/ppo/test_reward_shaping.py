"""Scores on their way to PPO: no penalty ever helps, and nothing bad passes without its name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo.reward_shaping import (
    RunningScores,
    clip_scores,
    combine_scores,
    penalise_length,
    penalise_missing_eos,
    read_scores,
    score_moments,
)

nan, inf = float("nan"), float("inf")


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_figures_become_scores_and_none_becomes_not_applicable() -> None:
    scores, applies = read_scores([1, None, True, -0.5], "length", 4)
    assert scores.dtype == torch.float32
    assert (scores.tolist(), applies.tolist()) == ([1, 0, 1, -0.5], [True, False, True, True])


def test_a_model_gives_a_tensor() -> None:
    given = torch.tensor([0.1, -3.5], dtype=torch.bfloat16)
    scores, applies = read_scores(given, "model", 2)
    assert torch.equal(scores, given.float())
    assert applies.all()
    assert applies.dtype == torch.bool


def test_an_empty_batch_has_empty_scores() -> None:
    scores, applies = read_scores([], "model", 0)
    assert scores.shape == applies.shape == (0,)


@pytest.mark.parametrize(
    ("figures", "kind", "message"),
    [
        (
            [1.0, nan, 3.0],
            ValueError,
            "reward 'math' must be finite, got nan for sample 1 of the batch",
        ),
        ([1.0, 2.0, -inf], ValueError, "must be finite, got -inf for sample 2 of the batch"),
        ([1e300, 0.0, 0.0], ValueError, "must be finite, got inf for sample 0 of the batch"),
        (torch.tensor([1.0, nan, 3.0]), ValueError, "got nan for sample 1 of the batch"),
        ([1.0, 2.0], ValueError, "reward 'math' must give 3 scores, got 2"),
        (
            [1.0, "2", 3.0],
            TypeError,
            "reward 'math' must be a number or None, got str for sample 1 of the batch",
        ),
        (torch.zeros(3, 1), TypeError, "must be a number or None, got list for sample 0"),
    ],
)
def test_a_bad_figure_is_named(figures: Any, kind: type[Exception], message: str) -> None:
    assert message in refused(kind, lambda: read_scores(figures, "math", 3))


def test_weights_of_rewards_that_do_not_apply_are_left_out() -> None:
    sources = {
        "math": read_scores([1.0, None, 0.5], "math", 3),
        "format": read_scores([1.0, 1.0, -1.0], "format", 3),
        "cost": read_scores([4.0, 2.0, None], "cost", 3),
    }
    total = combine_scores(sources, {"math": 2.0, "format": 0.5, "cost": -0.25})
    # 2 + 0.5 − 1;  0.5 − 0.5;  1 − 0.5
    assert total.tolist() == [1.5, 0.0, 0.5]


def test_the_weights_belong_to_the_names_and_not_to_the_order() -> None:
    sources = {"a": read_scores([1.0], "a", 1), "b": read_scores([10.0], "b", 1)}
    assert combine_scores(sources, {"b": 2.0, "a": 1.0}).tolist() == [21.0]


def test_a_sample_that_no_reward_judges_is_an_error() -> None:
    sources = {name: read_scores([1.0, None], name, 2) for name in ("a", "b")}
    assert refused(ValueError, lambda: combine_scores(sources, {"a": 1.0, "b": 1.0})) == (
        "no reward applies to sample 1 of the batch: a, b gave None"
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"b": 1.0}, "weights must name the rewards ['a'], got ['b']"),
        ({"a": 1.0, "b": 1.0}, "weights must name the rewards ['a'], got ['a', 'b']"),
        ({"a": inf}, "weight of reward 'a' must be finite, got inf"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: dict[str, float], message: str) -> None:
    sources = {"a": read_scores([1.0], "a", 1)}
    assert refused(ValueError, lambda: combine_scores(sources, weights)) == message


def test_no_source_at_all_is_refused() -> None:
    expected = "sources must hold at least one reward, got none"
    assert refused(ValueError, lambda: combine_scores({}, {})) == expected


def test_the_clip_is_on_both_sides() -> None:
    clipped = clip_scores(torch.tensor([-12.0, -5.0, 0.3, 7.0]), 5.0)
    assert clipped.tolist() == pytest.approx([-5, -5, 0.3, 5])


def test_the_length_penalty_on_paper() -> None:
    scores = torch.tensor([6.0, 6.0, 6.0, -6.0, -6.0, 0.0, 6.0])
    lengths = torch.tensor([1, 4, 9, 4, 9, 100, 0])
    # 6/1, 6/2, 6/3;  −6 − 6·(1 − 1/2), −6 − 6·(1 − 1/3);  0;  an empty response counts as 1
    expected = [6, 3, 2, -9, -10, 0, 6]
    assert penalise_length(scores, lengths).tolist() == pytest.approx(expected)
    by_length = penalise_length(scores[:3], lengths[:3], alpha=1.0)
    assert by_length.tolist() == pytest.approx([6, 1.5, 6 / 9])


@pytest.mark.parametrize("score", [3.0, -3.0, 1e-3, -1e-3])
def test_a_longer_response_of_the_same_score_is_never_better(score: float) -> None:
    lengths = torch.arange(1, 50)
    penalised = penalise_length(torch.full((49,), score), lengths).tolist()
    assert all(longer < shorter for shorter, longer in pairwise(penalised))


def test_a_better_score_of_the_same_length_stays_better() -> None:
    penalised = penalise_length(torch.linspace(-2, 2, 41), torch.full((41,), 30)).tolist()
    assert all(better > worse for worse, better in pairwise(penalised))


def test_alpha_zero_is_off() -> None:
    scores = torch.tensor([1.5, -2.5])
    assert torch.equal(penalise_length(scores, torch.tensor([7, 9]), alpha=0.0), scores)


def test_a_missing_eos_lowers_negative_scores_too() -> None:
    finished = torch.tensor([True, False, True, False])
    penalised = penalise_missing_eos(torch.tensor([2.0, 2.0, -2.0, -2.0]), finished, 1.5)
    assert penalised.tolist() == [2.0, 0.5, -2.0, -3.5]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda s: clip_scores(s, 0.0), ValueError, "limit must be positive and finite, got 0.0"),
        (lambda s: clip_scores(s, nan), ValueError, "limit must be positive and finite, got nan"),
        (
            lambda s: penalise_length(s, torch.ones(2), -1),
            ValueError,
            "alpha must be finite and not negative, got -1",
        ),
        (
            lambda s: penalise_length(s, torch.ones(1)),
            ValueError,
            "lengths must have shape [2] (as scores), got [1]",
        ),
        (
            lambda s: penalise_missing_eos(s, s > 0, -1.0),
            ValueError,
            "penalty must be finite and not negative, got -1.0",
        ),
        (
            lambda s: penalise_missing_eos(s, s, 1.0),
            TypeError,
            "finished must be bool (True = ended with EOS), got torch.float32",
        ),
        (
            lambda s: penalise_missing_eos(s, s[:1] > 0, 1.0),
            ValueError,
            "finished must have shape [2] (as scores), got [1]",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    call: Callable[[Tensor], object], kind: type[Exception], message: str
) -> None:
    assert refused(kind, lambda: call(torch.zeros(2))) == message


def test_running_normalisation_remembers_all_that_was_seen() -> None:
    batches = [[1.0, 2.0, 6.0], [-3.0], [4.0, 4.5]]
    running, seen = RunningScores(), list[float]()
    for batch in batches:
        seen += batch
        running = running.updated(score_moments(torch.tensor(batch)))
    assert running.count == 6
    found = running.normalised(torch.tensor(batches[2])).tolist()
    mean, std = statistics.mean(seen), statistics.stdev(seen)  # the sample's: n − 1
    assert found == pytest.approx([(score - mean) / std for score in batches[2]], rel=1e-5)


def test_ranks_add_up_to_one_process() -> None:
    scores = torch.tensor([3.0, 1.0, -4.0, 1.5, 9.0])
    start = RunningScores().updated(score_moments(torch.tensor([2.0, 7.0])))
    ranks = torch.stack([score_moments(scores[:2]), score_moments(scores[2:])])
    one, two = start.updated(score_moments(scores)), start.updated(ranks)
    assert asdict(two) == pytest.approx(asdict(one), rel=1e-6)


def test_a_saved_state_goes_on_bit_for_bit() -> None:
    start = RunningScores().updated(score_moments(torch.tensor([0.1, 0.7, 0.2])))
    loaded = RunningScores(**json.loads(json.dumps(asdict(start))))
    more = score_moments(torch.tensor([0.3, 1.3]))
    assert loaded.updated(more) == start.updated(more)


def test_thousands_of_batches_far_from_zero_lose_nothing() -> None:
    """Sums of squares would cancel: 10^4 squared, in float32, leaves no digit for the variance."""
    running = RunningScores()
    for _ in range(3000):
        running = running.updated(score_moments(torch.tensor([9999.5, 10000.5])))
    assert (running.count, running.mean) == (6000, 10_000)
    assert running.m2 == pytest.approx(1500)  # 6000 deviations of ½
    normalised = running.normalised(torch.tensor([9999.5, 10000.5]))
    assert normalised.tolist() == pytest.approx([-1, 1], rel=1e-3)


@pytest.mark.parametrize("scores", [[0.1], [0.1, 0.1, 0.1], [-7.3] * 64])
def test_one_score_or_equal_ones_are_zero(scores: list[float]) -> None:
    batch = torch.tensor(scores)
    normalised = RunningScores().updated(score_moments(batch)).normalised(batch)
    assert normalised.tolist() == [0] * len(scores)


def test_an_empty_batch_changes_nothing() -> None:
    running = RunningScores().updated(score_moments(torch.tensor([1.0, 3.0])))
    assert running.updated(score_moments(torch.zeros(0))) == running
    assert running.normalised(torch.zeros(0)).shape == (0,)


def test_a_nan_never_enters_the_memory() -> None:
    poisoned = score_moments(torch.tensor([1.0, nan]))
    message = refused(ValueError, lambda: RunningScores().updated(poisoned))
    assert message.startswith("moments must be finite, got [[2.0, nan")


def test_there_is_no_scale_before_the_first_batch() -> None:
    message = refused(ValueError, lambda: RunningScores().normalised(torch.ones(2)))
    assert message == "scores cannot be normalised before `updated` has seen some"
