"""Held-out figures with confidence intervals: on paper, and on a run whose outcome is known."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import ppo.eval
from ppo.batch import Rollout
from ppo.config import parse_args, to_yaml
from ppo.data import EncodedPrompts
from ppo.eval import as_json, evaluate, interval, kl_of, main, with_reward_model
from ppo.generate import open_run, read_run_prompts
from ppo.models import Models
from ppo.policy import Policy
from ppo.rollout import Sampling, cut_at_eos
from tests.ppo.conftest import tiny_tokenizer


def words(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function: how many words a response has."""
    return [float(len(response.split())) for response in responses]


@pytest.fixture
def run(folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose actor has moved, and whose rewards are the reward model and `words`."""
    monkeypatch.setitem(sys.modules, "eval_rewards", sys.modules[__name__])
    flags = {
        **folders,
        "eval_prompts": folders["prompts"],
        "reward_functions": '{"eval_rewards:words": 2.0}',
        "reward_model_weight": 0.5,
        "rollout.batch_size": 4,
        "rollout.max_new_tokens": 6,
    }
    model = AutoModelForCausalLM.from_pretrained(folders["actor"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "run" / "actor")
    tiny_tokenizer().save_pretrained(tmp_path / "run" / "actor")
    config = parse_args([f"--{key}={value}" for key, value in flags.items()])
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    return tmp_path / "run"


def test_the_interval_is_student_s_for_normal_values() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1))
    found = interval(values)
    half = 1.9659 * float(values.std()) / 20  # t of 399 degrees of freedom
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.mean - half, abs=0.08 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.08 * half)


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    generator = torch.Generator().manual_seed(2)
    samples = torch.rand(200, 40, generator=generator)
    hits = [found.low <= 0.5 <= found.high for found in map(interval, samples)]
    assert 180 <= sum(hits) <= 198  # 190 expected, standard deviation 3.1


def test_equal_values_and_a_single_one() -> None:
    assert interval(torch.full((5,), 2.0)) == ppo.eval.Figure(2.0, 2.0, 2.0)
    alone = interval(torch.tensor([3]))
    assert (alone.mean, str(alone)) == (3.0, "3.000")
    assert math.isnan(alone.low)
    with pytest.raises(ValueError, match=r"values must have shape \[n\] with n >= 1, got \[0\]"):
        interval(torch.empty(0))


def fixed_sample(monkeypatch: pytest.MonkeyPatch, actor: Tensor, ref: Tensor) -> None:
    """Have the two models answer with these token ids, whatever the prompts."""

    def answer(
        policy: Policy, models: Models, sampling: Sampling, prompts: EncodedPrompts, seed: int
    ) -> Rollout:
        rows = (actor if policy is models.actor else ref)[: len(prompts)]
        ids = torch.tensor(prompts.rows)
        return cut_at_eos(ids, ids >= 0, rows, [2], 0)

    monkeypatch.setattr(ppo.eval, "sample", answer)


def test_scores_wins_and_lengths_on_paper(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, models = open_run(run)
    prompts = read_run_prompts(config, models.tokenizer, [], config.eval_prompts, count=2)
    # prompt 0: actor 3 and 1 words, reference 1 and 1; prompt 1: actor 2 and 2, reference 3 and 0
    actor = torch.tensor([[7, 7, 7, 2], [7, 2, 2, 2], [7, 7, 2, 2], [7, 7, 2, 2]])
    ref = torch.tensor([[7, 2, 2, 2], [7, 2, 2, 2], [7, 7, 7, 2], [2, 2, 2, 2]])
    fixed_sample(monkeypatch, actor, ref)
    found = evaluate(config, models, prompts, samples=2)  # without the reward model
    assert found.actor["score"].mean == 2.0 * (3 + 1 + 2 + 2) / 4
    assert found.reference["score"].mean == 2.0 * (1 + 1 + 3 + 0) / 4
    assert found.difference["score"].mean == 1.5
    assert found.actor["length"].mean == (4 + 2 + 3 + 3) / 4  # with the EOS
    assert found.win_rate.mean == (1 + 0.5 + 0 + 1) / 4
    assert (found.difference["score"].low, found.difference["score"].high) == (1.0, 2.0)
    assert (found.prompts, found.samples) == (2, 2)


def test_the_reward_model_counts_with_its_weight(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, models = open_run(run)
    prompts = read_run_prompts(config, models.tokenizer, [], config.eval_prompts, count=2)
    same = torch.tensor([[7, 7, 2], [8, 2, 2]])
    fixed_sample(monkeypatch, same, same)
    models = with_reward_model(config, models)
    assert models.reward_model is not None
    found = evaluate(config, models, prompts)
    with torch.no_grad():
        rows = [
            torch.tensor([prompts.rows[0] + [7, 7, 2]]),
            torch.tensor([prompts.rows[1] + [8, 2]]),
        ]
        judged = [float(models.reward_model(input_ids=row).logits) for row in rows]
    assert found.actor["score"].mean == pytest.approx(0.5 * sum(judged) / 2 + 2.0 * 1.5, rel=1e-5)
    assert found.win_rate.mean == 0.5
    assert found.difference["score"] == ppo.eval.Figure(0.0, 0.0, 0.0)


def test_kl_is_the_sum_over_the_tokens_that_count(run: Path) -> None:
    config, models = open_run(run)
    ids = torch.tensor([[1, 6, 5], [1, 7, 5]])
    rollout = cut_at_eos(ids, ids >= 0, torch.tensor([[8, 9, 2], [9, 2, 7]]), [2], 0)
    found = kl_of(config, models, rollout)
    expected = []
    for row, length in ((0, 3), (1, 2)):
        tokens = rollout.sequences[row : row + 1, : 3 + length]
        with torch.no_grad():
            ours, theirs = (
                policy.model(input_ids=tokens).logits[0, 2:-1].log_softmax(-1)
                for policy in (models.actor, models.ref)
            )
        picked = tokens[0, 3:, None]
        expected.append(float((ours.gather(1, picked) - theirs.gather(1, picked)).sum()))
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


def test_the_command_prints_a_table_and_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([str(run)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("8 prompts x 1", "score", "length", "win rate", "KL"))
    assert main([str(run), "--json", "--count", "1", "--samples", "2"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["prompts"], tree["samples"]) == (1, 2)
    assert tree["actor"]["score"]["low"] is None  # one prompt has no interval
    assert main([str(run), "--samples", "0"]) == 2
    assert capsys.readouterr().err == "error: samples must be at least 1, got 0\n"


def test_json_is_the_same_for_the_same_seed(run: Path) -> None:
    config, models = open_run(run)
    prompts = read_run_prompts(config, models.tokenizer, [], config.eval_prompts, count=None)
    models = with_reward_model(config, models)
    one, two, other = (as_json(evaluate(config, models, prompts, seed=s)) for s in (5, 5, 6))
    assert one == two != other


def test_a_run_without_held_out_prompts_asks_for_some(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / "config.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("eval_prompts")]
    (run / "config.yaml").write_text("\n".join(lines))
    capsys.readouterr()
    assert main([str(run)]) == 2
    assert "give held-out prompts with --prompts" in capsys.readouterr().err
