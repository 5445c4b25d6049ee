"""`python -m ppo.reward_model`: a reward model from a file of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForSequenceClassification

from ppo.command_line import Command
from ppo.demo.progress import BuildProgress
from ppo.prompt_files import read_conversations
from ppo.reward_model import (
    Pair,
    evaluate_reward_model,
    rescale_scores,
    score_all,
    train_reward_model,
)
from ppo.schema import InputError, setting
from ppo.sft import Example
from ppo.supervised_command import (
    Rows,
    SupervisedConfig,
    load_model,
    read_and_encode,
    run,
    save,
    start,
)

SCALED_ON = 512


@dataclass(frozen=True)
class RewardModelConfig(SupervisedConfig):
    """A reward model from preferences."""

    preferences: str = setting(
        "", "pairs of a chosen and a rejected response: file, folder or hub id; required"
    )
    eval_preferences: str | None = setting(
        None, "held-out pairs; null: eval_fraction of the prompts"
    )
    chosen_column: str = setting(
        "chosen", "column of the better response, or of the whole conversation that it ends"
    )
    rejected_column: str = setting("rejected", "column of the worse one, likewise")
    lr: float = setting(1e-5, "learning rate of AdamW at its plateau", "(0, inf)")
    center_coef: float = setting(
        0.01, "weight of (r_w + r_l)^2, which holds the scores near 0", "[0, inf)"
    )
    unit_scores: bool = setting(
        True, "scale the head at the end, so that the scores of the pairs have deviation 1"
    )

    def __post_init__(self) -> None:
        self.check("preferences")


COMMAND = Command(
    RewardModelConfig,
    "ppo.reward_model",
    "Train a reward model from preferences (Bradley-Terry) for `python -m ppo.train "
    "--reward-model FOLDER`.",
    {
        **dict.fromkeys(("model_name_or_path", "actor", "pretrain"), "model"),
        **dict.fromkeys(("dataset", "dataset_name", "data", "train_files"), "preferences"),
        **dict.fromkeys(("output_dir", "save_path"), "output"),
        **dict.fromkeys(("eval_data", "eval_dataset"), "eval_preferences"),
        **dict.fromkeys(("learning_rate",), "lr"),
        **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "epochs"),
        **dict.fromkeys(("max_length", "max_len", "max_seq_length"), "max_tokens"),
        "center_rewards_coefficient": "center_coef",
    },
)


def train(config: RewardModelConfig) -> dict[str, float]:
    """Train and save a reward model; returns its figures."""
    progress = BuildProgress(Console())
    tokenizer, limit = start(config)
    rows, heldout_rows, dropped = read_and_encode(
        config,
        tokenizer,
        limit,
        partial(_read, config),
        config.preferences,
        config.eval_preferences,
    )
    pairs, heldout = ([_pair(*row) for row in part] for part in (rows, heldout_rows))
    if dropped:
        progress.say(f"{dropped} pairs left out: longer than {limit} tokens")

    model = load_reward_model(config.model, tokenizer.pad_token_id, tokenizer.eos_token_id)
    figures: dict[str, float] = {"pairs": len(pairs), "heldout_pairs": len(heldout)}
    if heldout:
        before = evaluate_reward_model(model, heldout, batch_size=config.batch_size)
        figures["heldout_accuracy_before"] = before
    steps = config.epochs * max(1, len(pairs) // config.batch_size)
    with progress.stage("reward model", steps) as on_step:
        train_reward_model(
            model,
            pairs,
            epochs=config.epochs,
            batch_size=config.batch_size,
            schedule=config.schedule,
            seed=config.seed,
            center_coef=config.center_coef,
            on_step=on_step,
        )
    if heldout:
        after = evaluate_reward_model(model, heldout, batch_size=config.batch_size)
        figures["heldout_accuracy"] = after
        progress.say(
            f"right on {after:.1%} of {len(heldout)} held-out pairs ({before:.1%} before training)"
        )
    if config.unit_scores:
        figures["score_sd_before_scaling"] = _scale(model, heldout or pairs, config.batch_size)
    save(model, tokenizer, config, figures)
    progress.say(f"saved: python -m ppo.train --reward-model {config.output} ...")
    return figures


def load_reward_model(source: str, pad_id: int | None, eos_id: int) -> Any:
    """Load a decoder with a scalar head; a fresh head starts at N(0, 1/(D+1)).

    Source: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325
    """
    model, fresh = load_model(AutoModelForSequenceClassification, source, num_labels=1)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise InputError(f"model: {source} is no decoder: it has no `score` head on its last token")
    if "score.weight" in fresh:
        nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    # Without it transformers refuses batches of more than one text.
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = (
        eos_id if pad_id is None else pad_id
    )
    return model.eval()


def _read(config: RewardModelConfig, source: str) -> Rows:
    columns = {"chosen_column": config.chosen_column, "rejected_column": config.rejected_column}
    return read_conversations(source, config.prompt_column, columns)


def _pair(chosen: Example, rejected: Example) -> Pair:
    return Pair([*chosen.prompt, *chosen.response], [*rejected.prompt, *rejected.response])


def _scale(model: Any, pairs: Sequence[Pair], batch_size: int) -> float:
    """Give the scores of some pairs deviation 1, the scale that PPO's defaults are made for."""
    texts = [text for pair in pairs[: SCALED_ON // 2] for text in (pair.chosen, pair.rejected)]
    scores = score_all(model, texts, batch_size=batch_size)
    if not torch.isfinite(scores).all() or float(scores.std()) == 0.0:
        raise InputError("unit_scores: the scores are all alike or not finite; try a smaller lr")
    return rescale_scores(model, scores)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return run(argv, COMMAND, train)
