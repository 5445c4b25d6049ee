"""Samples of a trained actor beside its reference, on tiny runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo.config import parse_args, to_yaml
from ppo.data import encode_prompts
from ppo.generate import answers, main, open_run, sample, texts_of
from ppo.prompt_files import Prompt
from ppo.train import main as train
from ppo.trainer import make_sampling
from tests.ppo.conftest import tiny_tokenizer

SETTINGS = {"steps": 2, "rollout.batch_size": 4, "rollout.max_new_tokens": 6}


@pytest.fixture
def run(folders: dict[str, str], tmp_path: Path) -> Path:
    """The folder of a run as training leaves it, with an actor that has moved."""
    folder = tmp_path / "run"
    flags = [f"--{key}={value}" for key, value in {**folders, **SETTINGS}.items()]
    model = AutoModelForCausalLM.from_pretrained(folders["actor"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder / "actor")
    tiny_tokenizer().save_pretrained(folder / "actor")
    (folder / "config.yaml").write_text(to_yaml(parse_args(flags)))
    return folder


@pytest.fixture
def make_run(folders: dict[str, str], tmp_path: Path) -> Callable[..., Path]:
    """Train for two steps with a rate that shows; returns the run's folder."""

    def build(*flags: str) -> Path:
        output = {"output_dir": str(tmp_path / "runs"), "optim.actor_lr": 0.05}
        settings = {**folders, **SETTINGS, **output}
        assert train([*(f"--{key}={value}" for key, value in settings.items()), *flags]) == 0
        (found,) = (tmp_path / "runs").iterdir()
        return found

    return build


def test_the_actor_is_the_trained_one_and_the_reference_is_not(run: Path, tmp_path: Path) -> None:
    _, models = open_run(run)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    trained = AutoModelForCausalLM.from_pretrained(run / "actor")
    for policy, expected in ((models.actor, trained), (models.ref, start)):
        pairs = zip(policy.model.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert models.critic is None
    assert models.reward_model is None


@pytest.mark.parametrize("sharing", ["lora", "trunk"])
def test_every_sharing_mode_can_be_opened(
    make_run: Callable[..., Path], tmp_path: Path, sharing: str
) -> None:
    _, models = open_run(make_run(f"--models.sharing={sharing}"))
    ids = torch.tensor([[1, 6, 7, 5]])
    with torch.no_grad():
        seen = [
            policy(ids[:, :2], ids[:, :2] > 0, ids[:, 2:], ids[:, 2:] > 0, temperature=1.0,
                   impl="auto").logprobs
            for policy in (models.actor, models.ref, models.actor)
        ]  # fmt: skip
        start = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
        logprobs = start(input_ids=ids).logits[:, 1:3].log_softmax(-1)
    expected = logprobs.gather(-1, ids[:, 2:, None]).squeeze(-1)
    torch.testing.assert_close(seen[1], expected)
    assert torch.equal(seen[0], seen[2])  # the adapter comes back on
    assert not torch.allclose(seen[0], seen[1], atol=1e-3)


def test_a_seed_fixes_the_samples_and_batches_cover_all(run: Path) -> None:
    config, models = open_run(run)
    sampling = make_sampling(config, models)
    texts = [Prompt(f"w{i}") for i in range(6, 11)]
    prompts = encode_prompts(models.tokenizer, texts, 9, "error", "here")
    before = torch.get_rng_state()
    one, two, other = (
        list(answers(models, sampling, prompts, seed=seed, batch_size=2)) for seed in (3, 3, 4)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert [row.prompt for row in one] == ["w6", "w7", "w8", "w9", "w10"]
    assert one == two != other


def test_texts_hold_what_counts_alone(run: Path) -> None:
    config, models = open_run(run)
    prompts = encode_prompts(models.tokenizer, [Prompt("w6")] * 8, 9, "error", "here")
    rollout = sample(models.ref, models, make_sampling(config, models), prompts, 0)
    for text, row, mask in zip(
        texts_of(models.tokenizer, rollout), rollout.responses, rollout.response_mask, strict=True
    ):
        words = [f"w{i}" for i in row[mask].tolist() if i > 2]
        assert text.split() == words


def test_the_command_prints_a_table_and_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--count", "3"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("prompt", "reference", "actor", "w6 w7 w5", "w8 w9 w5"))
    assert "w9 w10 w5" not in text
    flags = ["--json", "--max-new-tokens", "2", "--temperature", "0.5", "--seed", "1"]
    assert main([str(run), "--prompt", "w9 w8", "w7", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["w9 w8", "w7"]
    assert all(len(row["actor"].split()) <= 2 for row in rows)
    file = tmp_path / "more.txt"
    file.write_text("w11\nw12\n")
    assert main([str(run), "--prompts", str(file), "--json"]) == 0
    assert [json.loads(x)["prompt"] for x in capsys.readouterr().out.splitlines()] == ["w11", "w12"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0"], "rollout.temperature must be a number > 0, got 0.0"),
        (["--count", "0"], "count must be at least 1, got 0"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: no such file"),
    ],
)
def test_bad_input_is_one_line(
    run: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), *flags]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_folders_without_a_run_or_an_actor_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    wanted = f"error: {tmp_path} is not the folder of a run (it has no config.yaml)\n"
    assert capsys.readouterr().err == wanted
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    assert main([str(tmp_path)]) == 2
    assert "has no trained actor yet" in capsys.readouterr().err
