"""`python -m ppo.sft`: supervised fine-tuning on a file of prompts and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from transformers import AutoModelForCausalLM

from ppo.command_line import Command
from ppo.demo.progress import BuildProgress
from ppo.prompt_files import read_conversations
from ppo.schema import setting
from ppo.sft import evaluate_sft, train_sft
from ppo.supervised_command import (
    Rows,
    SupervisedConfig,
    load_model,
    read_and_encode,
    run,
    save,
    start,
)


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    data: str = setting("", "prompts with their responses: file, folder or hub id; required")
    eval_data: str | None = setting(None, "held-out ones; null: eval_fraction of the prompts")
    response_column: str = setting(
        "response", "column of the responses, or of the whole conversations that they end"
    )
    train_on_prompt: bool = setting(False, "whether the tokens of the prompts are learnt as well")

    def __post_init__(self) -> None:
        self.check("data")


COMMAND = Command(
    SFTConfig,
    "ppo.sft",
    "Fine-tune a language model on responses, for `python -m ppo.train --actor FOLDER`.",
    {
        **dict.fromkeys(("model_name_or_path", "actor", "pretrain"), "model"),
        **dict.fromkeys(("dataset", "dataset_name", "train_files"), "data"),
        **dict.fromkeys(("output_dir", "save_path"), "output"),
        "eval_dataset": "eval_data",
        "learning_rate": "lr",
        **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "epochs"),
        **dict.fromkeys(("max_length", "max_len", "max_seq_length"), "max_tokens"),
    },
)


def train(config: SFTConfig) -> dict[str, float]:
    """Fine-tune and save a language model; returns its figures."""
    progress = BuildProgress(Console())
    tokenizer, limit = start(config)
    rows, heldout_rows, dropped = read_and_encode(
        config, tokenizer, limit, partial(_read, config), config.data, config.eval_data
    )
    examples, heldout = ([example for (example,) in part] for part in (rows, heldout_rows))
    if dropped:
        progress.say(f"{dropped} rows left out: longer than {limit} tokens")

    model, _ = load_model(AutoModelForCausalLM, config.model)
    model.eval()
    figures: dict[str, float] = {"rows": len(examples), "heldout_rows": len(heldout)}
    if heldout:
        before = evaluate_sft(model, heldout, batch_size=config.batch_size)
        figures["heldout_loss_before"] = before
    steps = config.epochs * max(1, len(examples) // config.batch_size)
    with progress.stage("supervised fine-tuning", steps) as on_step:
        train_sft(
            model,
            examples,
            steps=steps,
            batch_size=config.batch_size,
            schedule=config.schedule,
            seed=config.seed,
            train_on_prompt=config.train_on_prompt,
            on_step=on_step,
        )
    if heldout:
        after = evaluate_sft(model, heldout, batch_size=config.batch_size)
        figures["heldout_loss"] = after
        progress.say(
            f"held-out loss {before:.3f} -> {after:.3f} nats per token of {len(heldout)} responses"
        )
    save(model, tokenizer, config, figures)
    progress.say(f"saved: python -m ppo.train --actor {config.output} ...")
    return figures


def _read(config: SFTConfig, source: str) -> Rows:
    columns = {"response_column": config.response_column}
    return read_conversations(source, config.prompt_column, columns)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return run(argv, COMMAND, train)
