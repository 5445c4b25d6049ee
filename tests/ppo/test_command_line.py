"""Command line and YAML: where values come from, which win, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from ppo.command_line import PEERS
from ppo.config import (
    Config,
    InputError,
    OptimConfig,
    PPOConfig,
    RolloutConfig,
    parse_args,
    settings,
    to_yaml,
)

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Put text or bytes in a YAML file and return its path."""

    def build(content: str | bytes, name: str = "run.yaml") -> str:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(raw)
        return str(tmp_path / name)

    return build


def refusal(*argv: str) -> str:
    """The one line that a person reads."""
    with pytest.raises(InputError) as caught:
        parse_args(argv)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_command_line_wins_over_yaml_and_yaml_over_defaults(write: Write) -> None:
    file = write("optim:\n  actor_lr: 3.0e-6\nsteps: 7\n")
    assert parse_args(["--config", file]).optim.actor_lr == 3e-6
    assert parse_args(["--config", file]).steps == 7
    assert parse_args(["--config", file, "--optim.actor_lr", "1e-6"]).optim.actor_lr == 1e-6
    assert parse_args(["--optim.actor_lr=1e-6", f"--config={file}"]).optim.actor_lr == 1e-6


def test_the_command_line_wins_even_when_it_gives_the_default(write: Write) -> None:
    file = write("optim: {actor_lr: 3.0e-6}\nthreads: 2\nppo: {whiten_advantages: false}")
    flags = ["--optim.actor_lr=3e-4", "--threads=null", "--ppo.whiten_advantages=true"]
    assert parse_args(["--config", file, *flags]) == Config()


def test_later_files_win_key_by_key(write: Write) -> None:
    first = write("ppo: {gamma: 0.5, kl_coef: 0.5}\nsteps: 5", "first.yaml")
    second = write("ppo: {gamma: 0.25}", "second.yaml")
    config = parse_args(["--config", first, "--config", second])
    assert (config.ppo.gamma, config.ppo.kl_coef, config.steps) == (0.25, 0.5, 5)


@pytest.mark.parametrize(
    "argv",
    [
        ["--reward-model", "r", "--ppo.kl-coef", "0.25"],
        ["--reward_model=r", "--ppo.kl_coef=0.25"],
    ],
)
def test_both_spellings_and_both_forms_of_an_option(argv: list[str]) -> None:
    config = parse_args([*argv, "--actor=my-model", "--prompts", "a-b_c.txt"])
    assert (config.reward_model, config.ppo.kl_coef) == ("r", 0.25)
    assert (config.actor, config.prompts) == ("my-model", "a-b_c.txt")  # values keep their dashes


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "0.0001", "+1e-4", ".1e-3"])
def test_scientific_notation_is_a_number(write: Write, number: str) -> None:
    assert parse_args([f"--optim.actor_lr={number}"]).optim.actor_lr == 1e-4
    file = write(f"optim:\n  actor_lr: {number}\n  betas: [0.5, {number}]\n")
    assert parse_args(["--config", file]).optim == OptimConfig(actor_lr=1e-4, betas=(0.5, 1e-4))


def test_values_arrive_in_their_declared_type(write: Write) -> None:
    file = write("ppo: {gamma: 1, cliprange_value: null, micro_batch_size: 4}")
    ppo = parse_args(["--config", file]).ppo
    assert isinstance(ppo.gamma, float)
    assert (ppo.gamma, ppo.cliprange_value, ppo.micro_batch_size) == (1.0, None, 4)
    assert parse_args(["--optim.betas=[0.5, 0.75]"]).optim.betas == (0.5, 0.75)
    assert parse_args(["--ppo.cliprange_value", "null"]).ppo.cliprange_value is None
    assert OptimConfig(betas=[0, 0.5]).betas == (0.0, 0.5)  # type: ignore[arg-type]


@example("#b")
@example("~")
@example("---")
@example("1e-4")
@given(st.text(min_size=1).filter(lambda text: text.strip() != "" and text != "null"))
def test_text_options_arrive_as_typed(text: str) -> None:
    config = parse_args([f"--output-dir={text}", f"--demo-dir={text}"])
    assert (config.output_dir, config.demo_dir) == (text, text)


@pytest.mark.parametrize(
    "text", ["1e5", "1e-4", "null", "yes", "12", "#x", " y", "a: b", "é\u2028"]
)
def test_what_is_written_is_read_back(write: Write, text: str) -> None:
    config = Config(
        actor="a",
        reward_model=text,
        prompts=text,
        output_dir=text,
        ppo=PPOConfig(kl_coef=1e-7, cliprange_value=None, dual_clip=3),
        optim=OptimConfig(actor_lr=1e-5, betas=(0.0, 0.5)),
        rollout=RolloutConfig(batch_size=6, long_prompts="drop"),
    )
    assert parse_args(["--config", write(to_yaml(config))]) == config


def test_print_config_is_accepted_again(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    for spelling in ("--print-config", "--print_config"):
        with pytest.raises(SystemExit, match="0"):
            parse_args(["--ppo.cliprange=0.125", spelling, "--optim.eps", "1e-9"])
        printed = capsys.readouterr().out
        assert parse_args(["--config", write(printed)]) == Config(
            ppo=PPOConfig(cliprange=0.125), optim=OptimConfig(eps=1e-9)
        )
        assert list(yaml.safe_load(printed))[-4:] == ["ppo", "rollout", "optim", "models"]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_each_field_with_type_default_and_meaning(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--steps", "3", flag])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.isascii()  # a console or a pipe may know nothing else
    for key, (declared, _) in settings().items():
        assert f"--{key} " in shown
        assert len(declared.metadata["meaning"]) > 12
        assert declared.metadata["meaning"] in shown
    assert "in [0, 1] (type: float, default: 0.95)" in shown


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ppo.clip_rnage", "ppo.cliprange"),
        ("ppo.gama", "ppo.gamma"),
        ("optim.gamma", "ppo.gamma"),
        ("gamma", "ppo.gamma"),
        ("num-epochs", "ppo.ppo_epochs"),
        ("temprature", "rollout.temperature"),
        ("reward_mode", "reward_model"),
        ("ppo.lam", "ppo.gae_lambda"),
        ("lambd", "ppo.gae_lambda"),
        ("ppo.lmbda", "ppo.gae_lambda"),
        ("eps_clip", "ppo.cliprange"),
        ("clip_ratio", "ppo.cliprange"),
        ("value_clip", "ppo.cliprange_value"),
        ("init_kl_coef", "ppo.kl_coef"),
        ("num_ppo_epochs", "ppo.ppo_epochs"),
        ("entropy_coeff", "ppo.entropy_coef"),
        ("response_length", "rollout.max_new_tokens"),
        ("learning_rate", "optim.actor_lr"),
        ("optim.lr", "optim.actor_lr"),
        ("bf16", "dtype"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(write: Write, name: str, nearest: str) -> None:
    flat = name.replace("-", "_")
    assert refusal(f"--{name}", "3").startswith(
        f"unknown key {flat} = '3': did you mean {nearest} ("
    )
    section, _, leaf = name.rpartition(".")
    file = write(f"steps: 1\n{section}:\n  {leaf}: 3\n" if section else f"seed: 1\n\n{leaf}: 3\n")
    line = refusal("--config", file)
    assert line.startswith(f"{file}:3: unknown key {flat} = 3: did you mean {nearest} (")


def test_every_suggestion_exists() -> None:
    assert set(PEERS.values()) <= set(settings())
    assert not set(PEERS) & {key.rpartition(".")[2] for key in settings()}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--nonsense"], "unknown key nonsense: --help lists every key"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "--seed", "1"], "--steps needs a value"),
        (["--actor", ""], "--actor needs a value"),
        (["--config"], "--config needs a value"),
        (["train"], "unexpected argument 'train': settings are given as --KEY VALUE"),
        (["-steps", "3"], "unexpected argument '-steps': settings are given as --KEY VALUE"),
        (["--ste", "3"], "unknown key ste = '3': did you mean steps (an integer >= 1)?"),
        (["--ppo", "3"], "ppo is a section of keys such as ppo.advantage_estimator, got '3'"),
        (["--config", "no.yaml"], "no.yaml: no such file"),
    ],
)
def test_a_broken_command_line(argv: list[str], line: str) -> None:
    assert refusal(*argv) == line


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", "3: steps is given twice"),
        ("ppo:\n  gamma: 1\n  gamma: 0\n", "3: ppo.gamma is given twice"),
        ("ppo:\n  gamma: 1\nppo:\n  kl_coef: 0\n", "3: ppo is given twice"),
        ("ppo.gamma: 1\nppo:\n  gamma: 0\n", "3: ppo.gamma is given twice"),
        ("reward-model: a\nreward_model: a\n", "2: reward_model is given twice"),
        ("ppo:\n\tgamma: 1", "2: broken YAML: found character '\\t' that cannot start any token"),
        ("steps: [1\n", "2: broken YAML: expected ',' or ']', but got '<stream end>'"),
        ("- steps\n", "1: expected lines of `key: value`"),
        ("? [a]\n: 1\n", "1: expected lines of `key: value`"),
        ("ppo: 3\n", "1: ppo is a section of keys such as ppo.advantage_estimator, got 3"),
        ("\nactor: 12\n", "2: actor must be text or null, got 12 (put quotes around it)"),
        ("output_dir: no\n", "1: output_dir must be text, got false (put quotes around it)"),
        ("ppo:\n  gamma: 'fast'\n", "2: ppo.gamma must be a number in [0, 1], got 'fast'"),
        ("steps: null\n", "1: steps must be an integer >= 1, got null"),
        ("seed: 2020-13-01\n", "1: month must be in 1..12"),
        ("steps: 1\n---\nsteps: 2\n", "2: broken YAML: but found another document"),
        (b"steps: 1\nactor: \xff\n", "2: not UTF-8 (byte 0xff at offset 16)"),
    ],
)
def test_a_broken_file(write: Write, content: str | bytes, line: str) -> None:
    file = write(content)
    assert refusal("--config", file) == f"{file}:{line}"


def test_hostile_yaml_is_one_line_as_well(write: Write) -> None:
    assert "could not determine a constructor" in refusal(
        "--config", write("actor: !!python/object/apply:os.getcwd []")
    )
    assert "recursi" in refusal("--config", write("[" * 5000))
    assert "recursive" in refusal("--config", write("steps: &a [*a]"))


@pytest.mark.parametrize("content", ["", "# steps: 3\n", "ppo:\n  # gamma: 1\n", b"\xef\xbb\xbf"])
def test_a_file_with_no_settings_changes_nothing(write: Write, content: str | bytes) -> None:
    assert parse_args(["--config", write(content)]) == Config()


def test_bom_and_crlf_in_yaml(write: Write) -> None:
    config = parse_args(["--config", write(b"\xef\xbb\xbfsteps: 3\r\noutput_dir: a\r\n")])
    assert (config.steps, config.output_dir) == (3, "a")
