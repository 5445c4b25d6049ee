"""Every setting of a run: name, type, default, allowed values and meaning.

The dataclasses below are the schema of the command line, of the YAML files and of Python callers
alike; `__post_init__` checks all three, so an impossible run fails before any model loads.
`ppo/command_line.py` turns arguments and YAML files into a `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field
from typing import Any, Literal

from ppo.schema import InputError, check_section, setting, settings_of

__all__ = [
    "Config",
    "InputError",
    "OptimConfig",
    "PPOConfig",
    "RolloutConfig",
    "parse_args",
    "settings",
    "to_yaml",
]


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm: advantages, losses and how often each rollout is used."""

    advantage_estimator: Literal["gae", "reinforce_pp", "rloo", "grpo"] = setting(
        "gae", "how advantages come about; all but gae do without a critic"
    )
    ppo_epochs: int = setting(2, "passes over each rollout", "[1, inf)")
    num_minibatches: int = setting(
        2, "optimiser steps in each pass; must divide the responses of a rollout", "[1, inf)"
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
    kl_controller: Literal["fixed", "proportional", "ppo_paper"] = setting(
        "fixed", "how beta moves after each rollout (Ziegler et al. 2019; PPO paper, section 4)"
    )
    kl_target: float = setting(
        6.0, "KL that the controller holds, nats summed over a response", "(0, inf)"
    )
    kl_horizon: float = setting(
        10_000.0, "responses in which the proportional controller corrects an error", "(0, inf)"
    )
    target_kl: float | None = setting(
        None, "skip a rollout's further updates once approx_kl passes this; null: never", "(0, inf)"
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", "[0, inf)")
    whiten_advantages: bool = setting(
        True, "scale GAE's advantages to mean 0 and variance 1 over the tokens that count"
    )
    missing_eos_penalty: float = setting(
        1.0, "subtracted from the score of a response without EOS, in reward units", "[0, inf)"
    )
    score_clip: float | None = setting(
        None, "scores are clipped to this size, before anything else; null: off", "(0, inf)"
    )
    score_normalization: Literal["none", "batch", "running"] = setting(
        "none", "scale scores to mean 0 and variance 1 over the batch, or over all seen so far"
    )
    length_penalty_alpha: float = setting(
        0.0, "score / length^alpha, with the same loss for negative scores; 0: off", "[0, inf)"
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = setting(
        "token-mean", "how token losses become one loss (names as in verl)"
    )

    def __post_init__(self) -> None:
        check_section(self, "ppo.")


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling: how many prompts, how long, how random."""

    batch_size: int = setting(64, "prompts sampled in each step", "[1, inf)")
    samples_per_prompt: int = setting(1, "responses to each of them", "[1, inf)")
    max_prompt_tokens: int = setting(512, "longest prompt, in tokens with BOS", "[1, inf)")
    long_prompts: Literal["error", "drop", "truncate"] = setting(
        "error", "what happens to longer prompts; truncate keeps BOS and the last tokens"
    )
    continue_assistant: bool = setting(
        False, "whether a chat prompt may end with the assistant's turn, which is then continued"
    )
    max_new_tokens: int = setting(48, "longest response, in tokens", "[1, inf)")
    temperature: float = setting(
        1.0, "divides the logits, when sampling and when training", "(0, inf)"
    )

    def __post_init__(self) -> None:
        check_section(self, "rollout.")

    @property
    def responses(self) -> int:
        """How many responses a step samples."""
        return self.batch_size * self.samples_per_prompt


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, one optimiser for the actor and one for the critic."""

    actor_lr: float = setting(3e-4, "learning rate of the actor", "[0, inf)")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "[0, inf)")
    betas: tuple[float, float] = setting(
        (0.9, 0.95), "decay of the first and second moment", "[0, 1)"
    )
    eps: float = setting(1e-5, "epsilon of AdamW (Huang et al. 2022)", "(0, inf)")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "how the learning rates fall over the run's optimiser steps"
    )
    warmup_steps: int = setting(0, "optimiser steps in which the rates rise at first", "[0, inf)")
    lr_floor: float = setting(0.0, "share of the rates that is left at the end", "[0, 1]")
    weight_decay: float = setting(0.0, "decoupled weight decay", "[0, inf)")
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this 2-norm", "(0, inf)")

    def __post_init__(self) -> None:
        check_section(self, "optim.")


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
    prompt_column: str = setting(
        "prompt", "column of the prompt files: text or chat messages; chosen: HH-RLHF transcripts"
    )
    system_prompt: str | None = setting(
        None, "system message in front of chat prompts that have none; null: nothing is added"
    )
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
        check_section(self, "")
        _check_sources(self)
        _check_minibatches(self.rollout.responses, self.ppo.num_minibatches)
        _check_kl_controller(self.ppo, self.rollout.responses)
        _check_estimator(self)
        if self.optim.warmup_steps > self.optimizer_steps:
            raise InputError(
                f"optim.warmup_steps must not exceed the run's {self.optimizer_steps} optimiser "
                f"steps, got {self.optim.warmup_steps}"
            )

    @property
    def optimizer_steps(self) -> int:
        """How many steps each optimiser takes in the run."""
        return self.steps * self.ppo.ppo_epochs * self.ppo.num_minibatches


def parse_args(argv: Sequence[str]) -> Config:
    """Return the settings that the command line and its YAML files ask for.

    Raises:
        InputError: an unknown key, a wrong type, a value out of range, an impossible combination.
        SystemExit: with code 0, after `--help` or `--print-config`.
    """
    from ppo.command_line import TRAIN, parse  # it imports this file

    return parse(argv, TRAIN)


def to_yaml(config: Config) -> str:
    """Write every setting as YAML that `--config` accepts and turns into the same Config."""
    from ppo.command_line import dump

    return dump(asdict(config))


def settings() -> Mapping[str, tuple[Field[Any], Any]]:
    """Map each dotted key to its field and its type."""
    return settings_of(Config)


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


def _check_minibatches(responses: int, num_minibatches: int) -> None:
    if responses % num_minibatches:
        lower = range(min(num_minibatches, responses), 0, -1)
        fits = next(number for number in lower if responses % number == 0)
        raise InputError(
            f"ppo.num_minibatches must divide the responses of a rollout ({responses}), "
            f"got {num_minibatches}; the next smaller that does is {fits}"
        )


def _check_estimator(config: Config) -> None:
    estimator = config.ppo.advantage_estimator
    if estimator in ("rloo", "grpo") and config.rollout.samples_per_prompt < 2:
        raise InputError(
            f"rollout.samples_per_prompt must be at least 2 for ppo.advantage_estimator "
            f"{estimator}, got {config.rollout.samples_per_prompt}: a response is compared with "
            "the others of its prompt"
        )
    if estimator != "gae" and config.critic is not None:
        raise InputError(
            f"critic must be null for ppo.advantage_estimator {estimator}, which has no critic, "
            f"got {config.critic!r}"
        )


def _check_kl_controller(ppo: PPOConfig, responses: int) -> None:
    if ppo.kl_controller == "fixed":
        return
    if ppo.kl_coef == 0:
        raise InputError(
            f"ppo.kl_coef must be positive for ppo.kl_controller {ppo.kl_controller}, got 0: "
            "no factor moves it from there"
        )
    if ppo.kl_controller == "proportional" and 0.2 * responses >= ppo.kl_horizon:
        raise InputError(
            f"ppo.kl_horizon must be greater than 0.2 x the responses of a rollout "
            f"({0.2 * responses:g}), got {ppo.kl_horizon:g}: ppo.kl_coef could turn negative"
        )
