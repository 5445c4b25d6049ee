"""`python -m ppo.sft` and `python -m ppo.reward_model`: from files to saved models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from ppo import reward_model_command, sft_command
from ppo.config import Config, InputError
from ppo.models import load_models
from ppo.prompt_files import Conversation, Prompt
from ppo.reward_model_command import RewardModelConfig, load_reward_model
from ppo.sft import Example
from ppo.sft_command import SFTConfig
from ppo.supervised_command import encode_rows, hold_out
from tests.ppo.conftest import EOS, llama_config, tiny_tokenizer

Save = Callable[..., Path]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def pairs(first: int, last: int) -> list[dict[str, Any]]:
    """The chosen response has w5, the rejected one w6, after prompts that differ."""
    return [
        {"prompt": f"w{i}{' w7' * (i % 3)}", "chosen": f"w{i + 1} w5", "rejected": f"w{i + 1} w6"}
        for i in range(first, last)
    ]


@pytest.fixture
def actor(llama: PreTrainedModel, save: Save) -> str:
    return str(save(llama, "actor"))


def conversation(prompt: str, response: str) -> Conversation:
    return Conversation(Prompt(prompt, "f:1"), response)


def test_the_ids_are_those_of_ppo() -> None:
    tokenizer = tiny_tokenizer()
    rows = [(conversation("w5 w6", "w7"), conversation("<bos> w5", "w7 w8 <eos>"))]
    encoded, dropped = encode_rows(tokenizer, rows, SFTConfig("m", "o", data="d"), 5)
    assert encoded == [(Example([1, 5, 6], [7, 2]), Example([1, 5], [7, 8, 2]))]
    assert dropped == 0


def test_a_chat_is_rendered_up_to_the_response() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w8"
    prompt = Prompt(({"role": "user", "content": "w5"},))
    config = SFTConfig("m", "o", data="d", system_prompt="w4")
    encoded, _ = encode_rows(tokenizer, [(Conversation(prompt, "w7"),)], config, 9)
    assert encoded == [(Example([9, 4, 9, 5, 8], [7, 2]),)]


def test_a_prompt_that_ends_with_the_assistant_names_no_key_of_another_command() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = Prompt(({"role": "assistant", "content": "w5"},), "f:3")
    with pytest.raises(InputError) as caught:
        encode_rows(tokenizer, [(Conversation(prompt, "w7"),)], SFTConfig("m", "o", data="d"), 9)
    assert str(caught.value) == (
        "f:3: the last message of the prompt is the assistant's, but the response is a turn of its "
        "own; end the prompt before it"
    )


def test_long_rows_are_refused_or_left_out() -> None:
    tokenizer = tiny_tokenizer()
    short, long = conversation("w5", "w6"), conversation("w5", "w6 w7 w8")
    rows = [(short, short), (short, long)]
    drop = SFTConfig("m", "o", data="d", long_texts="drop")
    encoded, dropped = encode_rows(tokenizer, rows, drop, 5)
    assert (encoded, dropped) == ([(Example([1, 5], [6, 2]),) * 2], 1)
    with pytest.raises(InputError) as caught:
        encode_rows(tokenizer, rows, SFTConfig("m", "o", data="d"), 5)
    assert str(caught.value) == (
        "f:1: prompt and response of 6 tokens are over the limit of 5 (max_tokens); "
        "1 of 2 rows are; long_texts=drop leaves them out"
    )
    with pytest.raises(InputError, match=r"2 of 2 rows are$"):
        encode_rows(tokenizer, rows, drop, 3)


def test_no_prompt_is_on_both_sides_of_the_split() -> None:
    rows = [(conversation(f"p{i % 20}", f"r{i}"),) for i in range(60)]
    train, heldout = hold_out(rows, 0.2, seed=0)
    prompts = [{row[0].prompt.content for row in part} for part in (train, heldout)]
    assert not prompts[0] & prompts[1]
    assert (len(prompts[1]), len(heldout), len(train)) == (4, 12, 48)
    assert hold_out(rows, 0.2, seed=0) == (train, heldout)
    assert hold_out(rows, 0.2, seed=1) != (train, heldout)
    assert hold_out(rows, 0.0, seed=0) == (rows, [])
    assert len(hold_out(rows, 1e-6, seed=0)[1]) == 3
    with pytest.raises(InputError, match=r"^eval_fraction: 0.5 of 1 prompts leaves none to train"):
        hold_out(rows[:1], 0.5, seed=0)


def test_a_fresh_head_is_small_and_a_trained_one_stays(
    actor: str, llama: PreTrainedModel, save: Save
) -> None:
    torch.manual_seed(3)
    heads = torch.stack([load_reward_model(actor, None, EOS).score.weight for _ in range(40)])
    # 40 heads of 32 weights: SD of the estimate 1/sqrt(2·1280) = 2 %
    assert heads.std().item() == pytest.approx(33**-0.5, rel=0.1)
    trained = LlamaForSequenceClassification(llama_config(num_labels=1))
    model = load_reward_model(str(save(trained, "trained")), 7, EOS)
    assert torch.equal(model.score.weight, trained.score.weight)
    assert (model.config.pad_token_id, model.training) == (7, False)


def test_an_encoder_is_refused(save: Save) -> None:
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    folder = save(BertModel(config), "bert")
    with pytest.raises(InputError, match=r"^model: .*bert is no decoder: it has no `score` head"):
        load_reward_model(str(folder), 0, EOS)


def test_a_reward_model_learns_and_ppo_takes_it(
    actor: str, folders: dict[str, str], tmp_path: Path
) -> None:
    config = RewardModelConfig(
        actor,
        str(tmp_path / "new" / "rm"),
        preferences=write(tmp_path / "p.jsonl", pairs(10, 42)),
        eval_preferences=write(tmp_path / "e.jsonl", pairs(42, 58)),
        batch_size=8,
        epochs=6,
        lr=3e-3,
        warmup_steps=2,
    )
    figures = reward_model_command.train(config)
    assert (figures["pairs"], figures["heldout_pairs"]) == (32, 16)
    assert figures["heldout_accuracy"] == 1.0
    sources: Any = {**folders, "actor": actor, "reward_model": config.output}
    models = load_models(Config(**sources))
    assert models.reward_shares_tokenizer
    # transformers' own reading of the saved folder, in one padded batch, agrees
    tokenizer = models.reward_tokenizer
    texts = [
        f"<bos> w{i}{' w7' * (i % 3)} w{i + 1} {word} <eos>"
        for i in range(42, 58)
        for word in ("w5", "w6")
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = models.reward_model(batch.input_ids, batch.attention_mask).logits[:, 0]
    assert (scores[::2] > scores[1::2]).all()
    assert scores.std().item() == pytest.approx(1.0, abs=1e-4)


def test_hh_transcripts_train_a_reward_model(actor: str, tmp_path: Path) -> None:
    talk = "\n\nHuman: w{0}\n\nAssistant: w4\n\nHuman: w7\n\nAssistant: {1}"
    rows = [
        {"chosen": talk.format(i, "w5"), "rejected": talk.format(i, "w6")} for i in range(8, 40)
    ]
    figures = reward_model_command.train(
        RewardModelConfig(
            actor,
            str(tmp_path / "rm"),
            preferences=write(tmp_path / "p.jsonl", rows),
            eval_fraction=0.25,
            batch_size=8,
            epochs=6,
            lr=3e-3,
            unit_scores=False,
        )
    )
    assert (figures["pairs"], figures["heldout_pairs"]) == (24, 8)
    assert figures["heldout_accuracy"] == 1.0
    assert "score_sd_before_scaling" not in figures


def test_sft_learns_the_responses(actor: str, tmp_path: Path) -> None:
    rows = [{"q": f"w{i}", "a": "w5 w6"} for i in range(8, 40)]
    config = SFTConfig(
        actor,
        str(tmp_path / "sft"),
        data=write(tmp_path / "d.jsonl", rows),
        prompt_column="q",
        response_column="a",
        eval_fraction=0.25,
        batch_size=8,
        epochs=20,
        lr=1e-2,
    )
    figures = sft_command.train(config)
    assert (figures["rows"], figures["heldout_rows"]) == (24, 8)
    assert figures["heldout_loss_before"] == pytest.approx(math.log(64), abs=0.3)
    assert figures["heldout_loss"] < 0.5
    model = AutoModelForCausalLM.from_pretrained(config.output)
    asked = torch.tensor([[1, 50]])  # never seen
    answer = model.generate(asked, do_sample=False, max_new_tokens=5)
    assert answer[0, 2:].tolist() == [5, 6, EOS]


def test_the_same_seed_gives_the_same_bytes(actor: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", pairs(10, 26))
    for name in ("a", "b"):
        reward_model_command.main(
            [f"--model={actor}", f"--preferences={file}", f"--output={tmp_path / name}"]
        )
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def run(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", module, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_both_commands_from_a_shell(actor: str, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", pairs(10, 42))
    sft, reward = tmp_path / "sft", tmp_path / "rm"
    common = ["--batch-size=8", "--threads=1", "--lr=1e-3"]
    done = run("ppo.sft", "--model", actor, "--data", data, "--output", str(sft),
               "--response-column=chosen", *common)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "held-out loss " in done.stdout
    assert f"saved: python -m ppo.train --actor {sft} ..." in done.stdout
    done = run("ppo.reward_model", "--model", str(sft), "--preferences", data, "--output",
               str(reward), *common)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert " of 2 held-out pairs (" in done.stdout
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    assert AutoConfig.from_pretrained(reward).num_labels == 1
    assert not model.training
    # the settings of the run are saved, with its figures, and are accepted again
    again = run("ppo.reward_model", "--config", str(reward / "training.yaml"))
    assert "# heldout_accuracy: " in (reward / "training.yaml").read_text()
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: output: {reward} exists already; give a new folder\n"


@pytest.mark.parametrize("command", [reward_model_command, sft_command])
def test_help_and_refusals(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nearest = "did you mean max_tokens (an integer >= 2 or null)?"
    source = "preferences" if command is reward_model_command else "data"
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert f"usage: python -m ppo.{command.__name__[4:].removesuffix('_command')} " in shown
    for argv, line in (
        ([], f"model, {source}, output must be given (--help lists every key)"),
        (["--model", "m"], f"{source}, output must be given (--help lists every key)"),
        (["--max_length=3"], f"unknown key max_length = '3': {nearest}"),
        (["--epochs=0"], "epochs must be an integer >= 1, got 0"),
        (["--model=/no/where", f"--{source}=x.txt", "--output=/nowhere/o"], None),
    ):  # fmt: skip
        assert command.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert line is None or error == f"error: {line}\n"


def test_every_suggestion_exists() -> None:
    for command in (reward_model_command.COMMAND, sft_command.COMMAND):
        assert set(command.peers.values()) <= set(command.settings)
        assert not set(command.peers) & set(command.settings)
