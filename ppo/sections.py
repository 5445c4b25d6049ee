"""The groups of settings: the algorithm, sampling, the optimisers, and who shares what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo.schema import check_section, setting


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
    micro_batch_tokens: int | None = setting(
        None,
        "tokens in one forward pass, in place of micro_batch_size; padding that is not "
        "packed away counts, and sequences go by length so that there is little of it",
        "[1, inf)",
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
    kl_estimator: Literal["k1", "abs", "k2", "k3", "exact"] = setting(
        "k1",
        "estimator of that KL from the sampled token (Schulman 2020); exact: over the vocabulary",
    )
    kl_in_loss: bool = setting(
        False, "charge the KL in the loss, with its unbiased gradient, instead of in the reward"
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
    bootstrap_truncated: bool = setting(
        False, "GAE goes on with the critic's value after a response without EOS, instead of 0"
    )
    critic_warmup_steps: int = setting(
        0, "rollouts at the start from which the critic alone learns", "[0, inf)"
    )
    critic_bias_from_scores: bool = setting(
        False, "shift the critic's bias so that its mean is the first rollout's mean score"
    )
    ptx_coef: float = setting(
        1.0, "weight of the supervised loss on ptx_data, PPO-ptx of Ouyang et al. 2022", "[0, inf)"
    )
    ptx_fraction: float = setting(
        0.1,
        "examples of ptx_data in each optimiser step, per response of its minibatch",
        "(0, inf)",
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
    min_new_tokens: int = setting(0, "no EOS is sampled before so many tokens", "[0, inf)")
    temperature: float = setting(
        1.0, "divides the logits, when sampling and when training", "(0, inf)"
    )
    top_k: int = setting(
        0,
        "sample from so many of the likeliest tokens; 0: all, which is what is trained",
        "[0, inf)",
    )
    top_p: float = setting(
        1.0, "sample from the likeliest tokens that hold this probability; 1: all", "(0, 1]"
    )
    stop_strings: tuple[str, ...] = setting(
        (), "texts that end a response, which keeps them; beside every EOS of the actor"
    )

    def __post_init__(self) -> None:
        check_section(self, "rollout.")

    @property
    def responses(self) -> int:
        """How many responses a step samples."""
        return self.batch_size * self.samples_per_prompt

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt_tokens + self.max_new_tokens


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
    clip_jointly: bool = setting(
        False, "one norm over actor and critic, as where one optimiser holds both (TRL, trlX)"
    )

    def __post_init__(self) -> None:
        check_section(self, "optim.")


@dataclass(frozen=True)
class ModelsConfig:
    """How actor, critic and reference share memory."""

    sharing: Literal["separate", "trunk", "lora"] = setting(
        "separate",
        "trunk: the critic is a head on the actor; lora: adapters on one base, which is reference",
    )
    value_gradient: bool = setting(
        False, "whether the value loss trains the trunk too, with sharing trunk"
    )
    packing: bool = setting(
        False, "run actor, critic and reference without padding, all sequences in one row"
    )
    gradient_checkpointing: bool = setting(
        False, "compute each layer again in the backward pass instead of keeping its activations"
    )
    lora_rank: int = setting(16, "r of each LoRA adapter (Hu et al. 2021)", "[1, inf)")
    lora_alpha: float = setting(32.0, "alpha: adapters count alpha/r times", "(0, inf)")
    lora_targets: str | None = setting(
        None, "layers with an adapter, as in q_proj,v_proj; null: all linear ones but the head"
    )

    def __post_init__(self) -> None:
        check_section(self, "models.")
