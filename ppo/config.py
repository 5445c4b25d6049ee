"""Every setting of a run: name, type, default, allowed values and meaning.

The dataclasses below are the schema of the command line, of the YAML files and of Python callers
alike; `__post_init__` checks all three, so an impossible run fails before any model loads.
`ppo/command_line.py` turns arguments and YAML files into a `Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class InputError(ValueError):
    """What a person gave does not work. The message is one line, fit to print without traceback."""

    def __init__(self, message: object) -> None:
        super().__init__(" ".join(str(message).splitlines()))


def setting(default: T, meaning: str, interval: str = "") -> T:
    """Declare a field by its default, its help text and, for numbers, the interval allowed."""
    return field(default=default, metadata={"meaning": meaning, "interval": interval})


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm: advantages, losses and how often each rollout is used."""

    ppo_epochs: int = setting(2, "passes over each rollout", "[1, inf)")
    num_minibatches: int = setting(
        2, "optimiser steps in each pass; must divide rollout.batch_size", "[1, inf)"
    )
    micro_batch_size: int | None = setting(
        None, "sequences in one forward pass; null: a whole minibatch; saves memory", "[1, inf)"
    )
    gamma: float = setting(1.0, "discount gamma of later rewards, per token", "[0, 1]")
    gae_lambda: float = setting(
        0.95, "lambda of GAE; 1 is Monte Carlo, 0 one-step TD (Schulman et al. 2016)", "[0, 1]"
    )
    cliprange: float = setting(
        0.2, "epsilon: the ratio is clipped at 1 - epsilon and 1 + epsilon (PPO paper)", "(0, 1)"
    )
    cliprange_high: float | None = setting(
        None, "upper clip width where it differs, clip-higher of DAPO; null: cliprange", "(0, inf)"
    )
    dual_clip: float | None = setting(
        None, "bounds the loss of negative advantages, c of Ye et al. 2020; null: off", "(1, inf)"
    )
    cliprange_value: float | None = setting(
        0.2, "how far a value may move from the rollout's, in reward units; null: off", "(0, inf)"
    )
    vf_coef: float = setting(1.0, "weight of the value loss", "[0, inf)")
    kl_coef: float = setting(
        0.05, "beta: reward lost for each nat of KL to the reference", "[0, inf)"
    )
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = setting(
        "k1", "estimator of that KL from the sampled token (Schulman 2020)"
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", "[0, inf)")
    whiten_advantages: bool = setting(
        True, "scale advantages to mean 0 and variance 1 over the tokens that count"
    )
    missing_eos_penalty: float = setting(
        1.0, "subtracted from the score of a response without EOS, in reward units", "[0, inf)"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = setting(
        "token-mean", "how token losses become one loss (names as in verl)"
    )

    def __post_init__(self) -> None:
        _check(self, "ppo.")


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling: how many prompts, how long, how random."""

    batch_size: int = setting(64, "prompts sampled in each step", "[1, inf)")
    max_prompt_tokens: int = setting(512, "longest prompt, in tokens with BOS", "[1, inf)")
    long_prompts: Literal["error", "drop"] = setting(
        "error", "what happens to longer prompts; they are never cut"
    )
    max_new_tokens: int = setting(48, "longest response, in tokens", "[1, inf)")
    temperature: float = setting(
        1.0, "divides the logits, when sampling and when training", "(0, inf)"
    )

    def __post_init__(self) -> None:
        _check(self, "rollout.")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, one optimiser for the actor and one for the critic."""

    actor_lr: float = setting(3e-4, "learning rate of the actor", "[0, inf)")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "[0, inf)")
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the first and second moment", "[0, 1)"
    )
    eps: float = setting(1e-5, "epsilon of AdamW (Huang et al. 2022)", "(0, inf)")
    weight_decay: float = setting(0.0, "decoupled weight decay", "[0, inf)")
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this 2-norm", "(0, inf)")

    def __post_init__(self) -> None:
        _check(self, "optim.")


@dataclass(frozen=True)
class Config:
    """A whole run. Without actor, reward_model and prompts it trains the embedded demo."""

    actor: str | None = setting(None, "model to train: folder or hub id; null: the embedded demo")
    reward_model: str | None = setting(
        None, "sequence classifier with one label that scores responses: folder or hub id"
    )
    critic: str | None = setting(
        None, "start of the value model: folder or hub id; null: reward model or actor"
    )
    ref: str | None = setting(None, "frozen reference: folder or hub id; null: the actor's start")
    prompts: str | None = setting(
        None, "training prompts: .jsonl, .json, .csv, .txt or .parquet file, or dataset id"
    )
    prompt_column: str = setting("prompt", "column of the prompt files that holds the text")
    eval_prompts: str | None = setting(
        None, "held-out prompts, sampled before and after; same formats"
    )
    judge: str | None = setting(
        None, "module:function from prompts and responses to scores; it measures, never trains"
    )
    demo_dir: str | None = setting(None, "folder of the embedded demo; null: the user's cache")
    output_dir: str = setting("runs", "each run makes a folder of its own in here")
    steps: int = setting(40, "rollouts, each followed by its updates", "[1, inf)")
    seed: int = setting(0, "fixes every random number of the run", "[0, 4294967295]")
    threads: int | None = setting(None, "CPU threads of torch; null: all cores", "[1, inf)")
    sample_every: int = setting(10, "steps between tables of sampled responses", "[1, inf)")
    impl: Literal["auto", "triton", "torch", "reference"] = setting(
        "auto", "implementation of the operators; auto: triton on a GPU, torch elsewhere"
    )
    dtype: Literal["float32", "bfloat16"] = setting("float32", "number format of the weights")
    ppo: PPOConfig = field(default_factory=PPOConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _check(self, "")
        _check_sources(self)
        _check_minibatches(self.rollout.batch_size, self.ppo.num_minibatches)


def parse_args(argv: Sequence[str]) -> Config:
    """Return the settings that the command line and its YAML files ask for.

    Raises:
        InputError: an unknown key, a wrong type, a value out of range, an impossible combination.
        SystemExit: with code 0, after `--help` or `--print-config`.
    """
    from ppo.command_line import parse  # it imports this file

    return parse(argv)


def to_yaml(config: Config) -> str:
    """Write every setting as YAML that `--config` accepts and turns into the same Config."""
    from ppo.command_line import dump

    return dump(asdict(config))


@cache
def settings() -> Mapping[str, tuple[Field[Any], Any]]:
    """Map each dotted key to its field and its type."""
    return dict(_walk(Config, ""))


def expected(key: str) -> str:
    """Describe the values that a key takes: `a number in [0, 1]`."""
    declared, hint = settings()[key]
    return _describe(hint, declared.metadata["interval"])


def check_value(key: str, value: object) -> Any:
    """Return the value in the type of this key's field, or raise InputError."""
    declared, hint = settings()[key]
    try:
        return _convert(value, hint, declared.metadata["interval"])
    except (ValueError, OverflowError):
        unquoted = hint in (str, str | None) and isinstance(value, (bool, int, float))
        raise InputError(
            f"{key} must be {expected(key)}, got {show(value)}"
            f"{' (put quotes around it)' if unquoted else ''}"
        ) from None


def show(value: object) -> str:
    """Write a value as YAML would, cut to a readable length."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _walk(cls: Any, prefix: str) -> Iterator[tuple[str, tuple[Field[Any], Any]]]:
    hints = get_type_hints(cls)
    for declared in fields(cls):
        if declared.metadata:
            yield prefix + declared.name, (declared, hints[declared.name])
        else:
            yield from _walk(hints[declared.name], f"{declared.name}.")


def _check(section: Any, prefix: str) -> None:
    """Check each field and store it in its declared type (1 becomes 1.0, a list a tuple)."""
    hints = get_type_hints(type(section))
    for declared in fields(section):
        value = getattr(section, declared.name)
        if declared.metadata:
            # the only way to finish a frozen dataclass
            object.__setattr__(section, declared.name, check_value(prefix + declared.name, value))
        elif not isinstance(value, hints[declared.name]):
            wanted = hints[declared.name].__name__
            raise InputError(f"{declared.name} must be a {wanted}, got {show(value)}")


def _convert(value: Any, hint: Any, interval: str) -> Any:
    if get_origin(hint) is UnionType:
        hint, _ = get_args(hint)  # all unions here are `X | None`
        if value is None:
            return None
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        items = zip(value, get_args(hint), strict=True)
        return tuple(_convert(item, kind, interval) for item, kind in items)
    if get_origin(hint) is Literal and isinstance(value, str) and value in get_args(hint):
        return value
    if hint is str and isinstance(value, str) and value.strip():
        return value
    if hint is bool and isinstance(value, bool):
        return value
    numeric = {int: (int,), float: (int, float)}
    if (
        isinstance(value, numeric.get(hint, ()))
        and not isinstance(value, bool)
        and _inside(value, interval)
    ):
        return hint(value)
    raise ValueError


def _inside(number: float, interval: str) -> bool:
    """Infinite ends are open, so infinities are outside; so is NaN, as no comparison holds."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < number or (low == number and interval[0] == "[")
    return above and (number < high or (number == high and interval[-1] == "]"))


def _describe(hint: Any, interval: str) -> str:
    if get_origin(hint) is UnionType:
        return f"{_describe(get_args(hint)[0], interval)} or null"
    if get_origin(hint) is tuple:
        return f"two numbers in {interval}, such as [0.9, 0.95]"
    if get_origin(hint) is Literal:
        *most, last = get_args(hint)
        return f"{', '.join(most)} or {last}"
    noun = {bool: "true or false", str: "text", int: "an integer", float: "a number"}[hint]
    low, _, high = interval[1:-1].partition(", ")
    if not interval:
        return noun
    if high != "inf":
        return f"{noun} in {interval}"
    return f"{noun} {'>=' if interval[0] == '[' else '>'} {low}"


def _check_sources(config: Config) -> None:
    """The models and prompts come all from the caller or all from the demo."""
    needed = ("actor", "reward_model", "prompts")
    optional = ("critic", "ref", "eval_prompts", "prompt_column")
    missing = [name for name in needed if getattr(config, name) is None]
    given = [name for name in needed + optional if getattr(config, name) not in (None, "prompt")]
    if missing and given:
        raise InputError(
            f"{', '.join(given)} given without {', '.join(missing)}: "
            "give all of actor, reward_model and prompts, or none of them for the embedded demo"
        )


def _check_minibatches(batch_size: int, num_minibatches: int) -> None:
    if batch_size % num_minibatches:
        lower = range(min(num_minibatches, batch_size), 0, -1)
        fits = next(number for number in lower if batch_size % number == 0)
        raise InputError(
            f"ppo.num_minibatches must divide rollout.batch_size ({batch_size}), "
            f"got {num_minibatches}; the next smaller that does is {fits}"
        )
