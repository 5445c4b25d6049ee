"""The schema: defaults, allowed values, combinations, and one line for each refusal."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from ppo.config import Config, InputError, OptimConfig, PPOConfig, parse_args, settings


def refusal(*argv: str) -> str:
    """The one line that a person reads."""
    with pytest.raises(InputError) as caught:
        parse_args(argv)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_defaults() -> None:
    config = parse_args([])
    assert config == Config()
    assert (config.ppo.gamma, config.ppo.gae_lambda, config.ppo.cliprange) == (1.0, 0.95, 0.2)
    assert (config.ppo.kl_coef, config.optim.actor_lr, config.optim.critic_lr) == (0.05, 3e-4, 1e-3)
    assert (config.steps, config.rollout.batch_size, config.optim.betas) == (40, 64, (0.9, 0.95))


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("ppo.gamma=fast", "ppo.gamma must be a number in [0, 1], got 'fast'"),
        ("ppo.gamma=1.5", "ppo.gamma must be a number in [0, 1], got 1.5"),
        ("ppo.gamma=-0.1", "ppo.gamma must be a number in [0, 1], got -0.1"),
        ("ppo.gamma=true", "ppo.gamma must be a number in [0, 1], got 'true'"),
        ("ppo.cliprange=1", "ppo.cliprange must be a number in (0, 1), got 1.0"),
        ("ppo.dual_clip=1", "ppo.dual_clip must be a number > 1 or null, got 1.0"),
        ("ppo.kl_coef=-1", "ppo.kl_coef must be a number >= 0, got -1.0"),
        ("rollout.temperature=0", "rollout.temperature must be a number > 0, got 0.0"),
        ("steps=0", "steps must be an integer >= 1, got 0"),
        ("steps=1.5", "steps must be an integer >= 1, got '1.5'"),
        ("threads=0", "threads must be an integer >= 1 or null, got 0"),
        ("ppo.micro_batch_size=0", "ppo.micro_batch_size must be an integer >= 1 or null, got 0"),
        ("ppo.whiten_advantages=2", "ppo.whiten_advantages must be true or false, got '2'"),
        ("impl=cuda", "impl must be auto, triton, torch or reference, got 'cuda'"),
        (
            "optim.betas=[0.9, 1]",
            "optim.betas must be two numbers in [0, 1), such as [0.9, 0.95], got (0.9, 1.0)",
        ),
        ("output_dir=", "output_dir must be text, got ''"),
        ("seed=4294967296", "seed must be an integer in [0, 4294967295], got 4294967296"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(argument: str, line: str) -> None:
    assert refusal(f"--{argument}") == line


@pytest.mark.parametrize("written", [".nan", ".inf", "-.inf", "1e999"])
@pytest.mark.parametrize(
    "key", [key for key, (_, hint) in settings().items() if hint in (float, float | None)]
)
def test_no_number_may_be_nan_or_infinite(key: str, written: str) -> None:
    assert refusal(f"--{key}={written}").startswith(f"{key} must be a number ")


@pytest.mark.parametrize("number", [math.nan, math.inf, True, "1", None, [1.0], 10**400])
def test_python_callers_are_checked_as_well(number: object) -> None:
    with pytest.raises(InputError, match=r"^ppo\.gamma must be a number in \[0, 1\], got "):
        PPOConfig(gamma=number)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^ppo\.gamma must be"):
        replace(Config(), ppo=replace(PPOConfig(), gamma=number))  # type: ignore[arg-type]


def test_what_only_python_can_give_wrong() -> None:
    with pytest.raises(InputError, match=r"^ppo\.kl_coef must be a number >= 0, got 1000"):
        PPOConfig(kl_coef=10**400)
    for betas in ((0.9,), (0.9, 0.9, 0.9), "99", 0.9):
        with pytest.raises(InputError, match=r"^optim\.betas must be two numbers"):
            OptimConfig(betas=betas)  # type: ignore[arg-type]


def test_a_section_must_be_its_dataclass() -> None:
    with pytest.raises(InputError, match=r"^ppo must be a PPOConfig, got {'gamma': 1}$"):
        Config(ppo={"gamma": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["actor"], "reward_model, prompts"),
        (["reward_model"], "actor, prompts"),
        (["prompts"], "actor, reward_model"),
        (["actor", "prompts"], "reward_model"),
        (["critic"], "actor, reward_model, prompts"),
        (["ref"], "actor, reward_model, prompts"),
        (["eval_prompts"], "actor, reward_model, prompts"),
        (["prompt_column"], "actor, reward_model, prompts"),
    ],
)
def test_models_and_prompts_come_together_or_not_at_all(given: list[str], missing: str) -> None:
    assert refusal(*(f"--{name}=x" for name in given)) == (
        f"{', '.join(given)} given without {missing}: give all of actor, reward_model and "
        "prompts, or none of them for the embedded demo"
    )


def test_what_may_stand_beside_the_demo() -> None:
    config = parse_args(["--judge", "a:b", "--demo-dir", "d", "--prompt-column", "prompt"])
    assert (config.actor, config.judge, config.demo_dir) == (None, "a:b", "d")


@pytest.mark.parametrize(("batch", "parts", "fits"), [(64, 9, 8), (4, 9, 4), (7, 2, 1)])
def test_minibatches_are_of_one_size(batch: int, parts: int, fits: int) -> None:
    assert refusal(f"--rollout.batch_size={batch}", f"--ppo.num_minibatches={parts}") == (
        f"ppo.num_minibatches must divide the responses of a rollout ({batch}), got {parts}; "
        f"the next smaller that does is {fits}"
    )


def test_each_number_has_an_interval_and_each_default_is_in_it() -> None:
    numeric = {int, float, int | None, float | None, tuple[float, float], dict[str, float]}
    for key, (declared, hint) in settings().items():
        assert (declared.metadata["interval"] != "") == (hint in numeric), key
    Config()


def test_a_config_can_be_pickled() -> None:
    config = Config(steps=3, ppo=PPOConfig(gamma=0.5))
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(InputError("a\nb\r\nc\u2028d")) == "a b c d"
    assert str(pickle.loads(pickle.dumps(InputError("a\nb")))) == "a b"


def test_settings_need_no_torch() -> None:
    code = (
        "import sys, ppo.config; ppo.config.parse_args(['--steps=3'])\n"
        "print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"kl_controller": "ppo_paper", "kl_coef": 0.0}, "ppo.kl_coef must be positive"),
        ({"kl_controller": "proportional", "kl_horizon": 12.8}, "ppo.kl_horizon must be greater"),
    ],
)
def test_a_controller_that_could_not_work_is_refused(ppo, message):
    with pytest.raises(InputError, match=message):
        Config(ppo=PPOConfig(**ppo))


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(InputError, match=r"optim.warmup_steps must not exceed the run's 160"):
        Config(optim=OptimConfig(warmup_steps=161))
