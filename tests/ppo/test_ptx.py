"""PPO-ptx: examples that are imitated beside PPO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ppo.config import InputError
from ppo.policy import Policy
from ppo.ptx import Examples, read_examples
from ppo.train import main
from tests.ppo.conftest import tiny_tokenizer

ROWS = [{"prompt": "w7 w8", "response": "w9"}, {"prompt": "w10", "response": "w11 w12"}]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def examples(file: Path, longest: int = 64) -> Examples:
    how = {"longest": longest, "system_prompt": None, "pad_id": 0, "seed": 3}
    return read_examples(str(file), tiny_tokenizer(), **how)


def test_the_loss_is_the_mean_nats_per_response_token(llama: PreTrainedModel, file: Path) -> None:
    found = examples(file).loss(Policy(llama), 10, coef=0.5, fraction=0.3, impl="torch")
    picked = torch.randint(2, (3,), generator=torch.Generator().manual_seed(3)).tolist()
    texts = [([1, 7, 8], [9, 2]), ([1, 10], [11, 12, 2])]  # BOS in front, EOS at the end
    total, count = 0.0, 0
    for prompt, response in (texts[index] for index in picked):
        with torch.no_grad():
            logits = llama(input_ids=torch.tensor([prompt + response])).logits[0].double()
        log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total -= float(log_p[range(len(response)), response].sum())
        count += len(response)
    assert found.item() == pytest.approx(0.5 * total / count, rel=1e-5)


def test_a_run_reports_it_and_its_weight_matters(
    folders: dict[str, str], file: Path, tmp_path: Path
) -> None:
    lines = {}
    for coef in (0.0, 20.0):
        out = tmp_path / str(coef)
        settings = {
            **folders, "ptx_data": file, "ppo.ptx_coef": coef, "ppo.ptx_fraction": 2.0,
            "rollout.batch_size": 4, "rollout.max_new_tokens": 5, "steps": 3, "output_dir": out,
            "optim.actor_lr": 3e-3, "optim.max_grad_norm": 100.0,
        }  # fmt: skip
        assert main([f"--{key}={value}" for key, value in settings.items()]) == 0
        (metrics,) = out.glob("*/metrics.jsonl")
        lines[coef] = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["loss/ptx_avg"] for line in lines[0.0]] == [0.0, 0.0, 0.0]
    assert lines[20.0][2]["loss/ptx_avg"] < lines[20.0][0]["loss/ptx_avg"] - 1.0


def test_what_is_too_long_is_refused_with_its_line(file: Path) -> None:
    with pytest.raises(
        InputError, match=r"examples\.jsonl:1: .* of 5 tokens are over .* 4 positions"
    ):
        examples(file, longest=4)
