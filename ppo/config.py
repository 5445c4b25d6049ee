"""Every setting of a run: name, type, default, allowed values and meaning.

The dataclasses below are the schema of the command line, of the YAML files and of Python callers
alike; `__post_init__` checks all three, so an impossible run fails before any model loads.
`ppo/command_line.py` turns arguments and YAML files into a `Config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field
from typing import Any, Literal

from ppo.schema import InputError, check_section, mapping, setting, settings_of
from ppo.sections import ModelsConfig, OptimConfig, PPOConfig, RolloutConfig

__all__ = [
    "Config",
    "InputError",
    "ModelsConfig",
    "OptimConfig",
    "PPOConfig",
    "RolloutConfig",
    "parse_args",
    "settings",
    "to_yaml",
]


@dataclass(frozen=True)
class Config:
    """A whole run. Without actor, reward_model and prompts it trains the embedded demo."""

    actor: str | None = setting(None, "model to train: folder or hub id; null: the embedded demo")
    reward_model: str | None = setting(
        None, "sequence classifier with one label that scores responses: folder or hub id"
    )
    reward_model_weight: float = setting(
        1.0, "weight of its score among the rewards", "(-inf, inf)"
    )
    reward_functions: dict[str, float] = mapping(
        "module:function or URL of each further reward, with its weight", "(-inf, inf)"
    )
    reward_timeout: float = setting(60.0, "seconds that a URL has to answer", "(0, inf)")
    reward_retries: int = setting(5, "further attempts at a URL, at growing distance", "[0, inf)")
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
    ptx_data: str | None = setting(
        None, "prompts and responses to be imitated beside PPO, as ppo.sft takes; null: none"
    )
    judge: str | None = setting(
        None, "module:function from prompts and responses to scores; it measures, never trains"
    )
    demo_dir: str | None = setting(None, "folder of the embedded demo; null: the user's cache")
    output_dir: str = setting("runs", "each run makes a folder of its own in here")
    resume: str | None = setting(
        None, "run folder to go on with, as if it had never stopped; auto: the newest that fits"
    )
    checkpoint_every: int = setting(
        50, "steps between checkpoints; 0: only where a run is stopped", "[0, inf)"
    )
    keep_last: int = setting(2, "checkpoints that stay on the disk", "[1, inf)")
    skip_bad_steps: bool = setting(
        False, "leave out optimiser steps with NaN or infinity, and count them, instead of stopping"
    )
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
    models: ModelsConfig = field(default_factory=ModelsConfig)

    def __post_init__(self) -> None:
        check_section(self, "")
        _check_sources(self)
        _check_minibatches(self.rollout.responses, self.ppo.num_minibatches)
        _check_kl_controller(self.ppo, self.rollout.responses)
        _check_estimator(self)
        _check_critic(self)
        _check_sharing(self)
        _check_lengths(self.rollout)
        _check_micro_batches(self)
        if self.optim.warmup_steps > self.optimizer_steps:
            raise InputError(
                f"optim.warmup_steps must not exceed the run's {self.optimizer_steps} optimiser "
                f"steps, got {self.optim.warmup_steps}"
            )

    @property
    def needs_critic(self) -> bool:
        """Whether values are estimated; the other estimators do without."""
        return self.ppo.advantage_estimator == "gae"

    @property
    def updates_per_step(self) -> int:
        """How many optimiser steps follow each rollout."""
        return self.ppo.ppo_epochs * self.ppo.num_minibatches

    @property
    def optimizer_steps(self) -> int:
        """How many steps the critic's optimiser takes; the actor's misses those of the warm-up."""
        return self.steps * self.updates_per_step


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
    own_reward = "reward_model" if not config.reward_functions else "reward_functions"
    needed = ("actor", own_reward, "prompts")
    optional = ("critic", "ref", "reward_model", "eval_prompts", "prompt_column")
    unset: tuple[object, ...] = (None, "prompt", {})
    missing = [name for name in needed if getattr(config, name) in unset]
    given = [
        name for name in dict.fromkeys(needed + optional) if getattr(config, name) not in unset
    ]
    if missing and given and given != ["reward_functions"]:
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


def _check_critic(config: Config) -> None:
    ppo = config.ppo
    if config.needs_critic:
        if ppo.critic_warmup_steps >= config.steps:
            raise InputError(
                f"ppo.critic_warmup_steps must be smaller than steps ({config.steps}), "
                f"got {ppo.critic_warmup_steps}: the actor would never learn"
            )
        return
    for name in ("critic_warmup_steps", "critic_bias_from_scores", "bootstrap_truncated"):
        if getattr(ppo, name):
            raise InputError(
                f"ppo.{name} needs ppo.advantage_estimator gae, got "
                f"{ppo.advantage_estimator}, which has no critic"
            )


def _check_sharing(config: Config) -> None:
    sharing = config.models.sharing
    if sharing == "trunk" and not config.needs_critic:
        raise InputError(
            "models.sharing must be separate or lora for ppo.advantage_estimator "
            f"{config.ppo.advantage_estimator}, which has no critic, got trunk"
        )
    if sharing == "trunk" and config.critic is not None:
        raise InputError(
            "critic must be null for models.sharing trunk, where the critic is a head on the "
            f"actor, got {config.critic!r}"
        )
    if config.models.value_gradient and sharing != "trunk":
        raise InputError(f"models.value_gradient needs models.sharing trunk, got {sharing}")


def _check_micro_batches(config: Config) -> None:
    tokens, longest = config.ppo.micro_batch_tokens, config.rollout.longest
    if tokens is None:
        return
    if config.ppo.micro_batch_size is not None:
        raise InputError("ppo.micro_batch_tokens and ppo.micro_batch_size: give one of them")
    if tokens < longest:
        raise InputError(
            f"ppo.micro_batch_tokens must hold the longest sequence, {longest} tokens "
            f"(rollout.max_prompt_tokens + rollout.max_new_tokens), got {tokens}"
        )


def _check_lengths(rollout: RolloutConfig) -> None:
    if rollout.min_new_tokens > rollout.max_new_tokens:
        raise InputError(
            f"rollout.min_new_tokens must not exceed rollout.max_new_tokens "
            f"({rollout.max_new_tokens}), got {rollout.min_new_tokens}"
        )
