"""What the Markdown files say: links lead somewhere, Python runs, commands parse, tables hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ppo.eval
import ppo.generate
import ppo.plan
from ppo.command_line import TRAIN, parse
from ppo.config import settings
from ppo.reward_model_command import COMMAND as REWARD_MODEL
from ppo.sft_command import COMMAND as SFT

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("ppo*/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    )
    if "egg-info" not in str(page)
)
FROM_TRL = ROOT / "docs" / "from_trl.md"
# The fields of trl.experimental.ppo.PPOConfig in TRL 1.9.0, without those of TrainingArguments.
TRL_FIELDS = (
    "learning_rate",
    "dataset_num_proc",
    "num_mini_batches",
    "total_episodes",
    "local_rollout_forward_batch_size",
    "num_sample_generations",
    "response_length",
    "stop_token",
    "stop_token_id",
    "temperature",
    "missing_eos_penalty",
    "sft_model_path",
    "world_size",
    "num_total_batches",
    "micro_batch_size",
    "local_batch_size",
    "batch_size",
    "local_mini_batch_size",
    "mini_batch_size",
    "push_to_hub",
    "reward_model_path",
    "model_adapter_name",
    "ref_adapter_name",
    "num_ppo_epochs",
    "whiten_rewards",
    "kl_coef",
    "kl_estimator",
    "cliprange",
    "vf_coef",
    "cliprange_value",
    "gamma",
    "lam",
    "ds3_gather_for_generation",
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def marks(language: str) -> list[Any]:
    """A test parameter for each block, called by its page and number."""
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language), 1)
    ]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


@pytest.mark.parametrize("code", marks("python"))
def test_python_blocks_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rollout = {  # a rollout that a block may take for granted
        **dict(zip(("rewards", "values", "old_logprobs"), torch.randn(3, 2, 3), strict=True)),
        "logits": torch.randn(2, 3, 7, requires_grad=True),
        "responses": torch.randint(7, (2, 3)),
        "response_mask": mask,
        "tokens_in_the_whole_minibatch": mask.sum(),
    }
    exec(compile(code, "block", "exec"), {"__name__": "block", **rollout})


def commands() -> Iterator[Any]:
    """Every shell command of the pages, lines joined and comments gone."""
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words)[:50]}")


def options_of(words: list[str]) -> list[str]:
    """Arguments up to a redirection, with files that the reader is told to write swapped out."""
    end = words.index(">") if ">" in words else len(words)
    return words[:end]


@pytest.mark.parametrize("words", list(commands()))
def test_commands_parse(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("run.yaml", "tldr.yaml"):
        (tmp_path / name).write_text("steps: 1\n")
    words = [str(tmp_path / w) if w in ("run.yaml", "tldr.yaml") else w for w in options_of(words)]
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets
    elif words[:2] == ["python", "-m"]:
        parses(words[2], words[3:])
    elif words[0] == "python":
        assert Path(words[1]).is_file()
    else:
        assert words[0] in ("pip", "accelerate", "git", "cd", "docker", "vllm")


def parses(module: str, arguments: list[str]) -> None:
    """Give a command's arguments to its parser, which raises or exits where they are wrong."""
    readers: dict[str, Any] = {
        "ppo.train": lambda: parse(arguments, TRAIN),
        "ppo.sft": lambda: parse(arguments, SFT),
        "ppo.reward_model": lambda: parse(arguments, REWARD_MODEL),
        "ppo.generate": lambda: ppo.generate.make_parser().parse_args(arguments),
        "ppo.eval": lambda: ppo.eval.make_parser().parse_args(arguments),
        "ppo.plan": lambda: ppo.plan.read_options(arguments),
    }
    if module.startswith("ppo.") and module != "ppo.report":
        readers[module]()


def test_a_wrong_command_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["make", "nonsense"], ["python", "nowhere.py"], ["rm", "x"]):
        with pytest.raises(AssertionError):
            test_commands_parse(words, monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="unknown key nonsense"):
        parses("ppo.train", ["--nonsense", "1"])


@pytest.mark.parametrize("field", TRL_FIELDS)
def test_every_field_of_trl_has_its_row_and_our_names_exist(field: str) -> None:
    rows = re.findall(rf"^\| `{field}` \| (.*?) \|", FROM_TRL.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 1
    for name in re.findall(r"`([\w.]+)[^`]*`", rows[0]):
        assert name in settings()


def test_the_port_parses_and_counts_as_trl_does(tmp_path: Path) -> None:
    (text,) = blocks(FROM_TRL, "yaml")
    (tmp_path / "tldr.yaml").write_text(text, encoding="utf-8")
    config = parse(["--config", str(tmp_path / "tldr.yaml")], TRAIN)
    assert config.rollout.batch_size == 16 * 4 * 8
    assert config.steps == 1_000_000 // config.rollout.batch_size
    assert config.optim.actor_lr == config.optim.critic_lr == 3e-6


def test_every_test_that_known_faults_names_exists() -> None:
    table = (ROOT / "docs" / "known_faults.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", table))
    files = (ROOT / "tests").rglob("test_*.py")
    known = {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert len(named) > 30
    assert named <= known


SCALES = [
    (sharing, model, gpus, batch)
    for sharing in ("separate", "lora")
    for model in ("7b", "13b", "70b")
    for gpus, batch in ((8, 256), (64, 1024), (512, 4096))
]


@pytest.mark.parametrize(
    "scale", [SCALES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SCALES[1:])]
)
def test_the_tables_of_scaling_are_what_the_command_prints(
    scale: tuple[str, str, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    sharing, model, gpus, batch = scale
    shapes = ROOT / "docs" / "shapes"
    options = {
        "config": shapes / "scaling.yaml",
        "actor": shapes / model,
        "reward-model": shapes / model,
        "models.sharing": sharing,
        "rollout.batch_size": batch,
        "gpus": gpus,
        "strategy": "fsdp2",
        "models.gradient_checkpointing": "true",
    }
    flags = [f"--{key}={value}" for key, value in options.items()]
    assert ppo.plan.main([*flags, "--markdown"]) == 0
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    *header, row = capsys.readouterr().out.splitlines()
    _, apart, lora = re.split(re.escape("\n".join(header)), page)
    assert f"\n{row}\n" in (apart if sharing == "separate" else lora)
