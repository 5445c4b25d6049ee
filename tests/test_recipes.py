"""Every recipe in `configs/` is accepted, and says what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppo.config import Config, parse_args

FOLDER = Path(__file__).parents[1] / "configs"
SOURCES = ["--actor=a", "--reward-model=r", "--prompts=p.jsonl"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_a_recipe_is_accepted_and_has_a_header(path: Path) -> None:
    parse_args(["--config", str(path), *SOURCES])
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("Purpose", "Hardware", "Command", "Expect"):
        assert any(line.startswith(f"# {word} ") for line in header), word


def test_the_demos_recipe_is_the_default() -> None:
    assert parse_args(["--config", str(FOLDER / "demo.yaml")]) == Config()


def test_the_rlvr_recipe_does_without_a_critic_as_its_header_says() -> None:
    flags = ["--ppo.advantage_estimator", "grpo", "--ppo.bootstrap_truncated", "false"]
    text = (FOLDER / "rlvr.yaml").read_text()
    assert " ".join(flags) in text
    more = ["--ppo.critic_warmup_steps", "0"]
    parse_args(["--config", str(FOLDER / "rlvr.yaml"), *SOURCES, *flags, *more])


def test_sums_have_their_answer_and_the_reward_finds_it() -> None:
    command = [sys.executable, str(FOLDER / "arithmetic.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2000
    words = rows[0]["prompt"].split()
    assert int(words[3]) + int(words[5].rstrip("?")) == rows[0]["answer"]
    sys.path.insert(0, str(FOLDER))
    try:
        from arithmetic import correct  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
    responses = [" 122", " It is 5, so 122.", "none", "122 or 121"]
    assert correct([""] * 4, responses, [122] * 4) == [1.0, 1.0, 0.0, 0.0]
