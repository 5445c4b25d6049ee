"""What `python -m ppo.sft` and `python -m ppo.reward_model` share: settings to a saved model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from accelerate.utils import set_seed
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ppo.command_line import Command, dump, parse
from ppo.data import encode_contents
from ppo.prompt_files import Conversation
from ppo.schema import InputError, check_section, setting
from ppo.sft import Example
from ppo.supervised import Schedule

C = TypeVar("C")
Item = TypeVar("Item")
Rows: TypeAlias = Sequence[tuple[Conversation, ...]]
EncodedRows: TypeAlias = list[tuple[Example, ...]]


@dataclass(frozen=True)
class SupervisedConfig:
    """The settings that both commands have."""

    model: str = setting("", "language model to start from: folder or hub id; required")
    output: str = setting("", "folder for the trained model and its tokenizer; required")
    prompt_column: str = setting("prompt", "column of the prompts: text or chat messages")
    system_prompt: str | None = setting(
        None, "system message in front of chat prompts that have none; null: nothing is added"
    )
    eval_fraction: float = setting(
        0.05, "share of the prompts held out where no file of held-out rows is given", "[0, 1)"
    )
    max_tokens: int | None = setting(
        None, "longest prompt and response together; null: what the model can take", "[2, inf)"
    )
    long_texts: Literal["error", "drop"] = setting("error", "what happens to longer ones")
    epochs: int = setting(1, "passes over the rows", "[1, inf)")
    batch_size: int = setting(32, "rows in each optimiser step", "[1, inf)")
    lr: float = setting(2e-5, "learning rate of AdamW at its plateau", "(0, inf)")
    warmup_steps: int = setting(20, "steps of linear warm-up", "[0, inf)")
    decay_fraction: float = setting(0.4, "last share of the steps, with linear decay", "[0, 1]")
    weight_decay: float = setting(0.01, "decoupled weight decay", "[0, inf)")
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this 2-norm", "(0, inf)")
    seed: int = setting(0, "fixes every random number of the run", "[0, 4294967295]")
    threads: int | None = setting(None, "CPU threads of torch; null: all cores", "[1, inf)")

    def check(self, *required: str) -> None:
        """Check every field, and that those without a default are given."""
        missing = [name for name in ("model", *required, "output") if not getattr(self, name)]
        if missing:
            raise InputError(f"{', '.join(missing)} must be given (--help lists every key)")
        check_section(self)

    @property
    def schedule(self) -> Schedule:
        """The optimiser's settings."""
        return Schedule(
            lr=self.lr,
            warmup_steps=self.warmup_steps,
            decay_fraction=self.decay_fraction,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


def run(argv: Sequence[str] | None, command: Command[C], work: Callable[[C], object]) -> int:
    """Run a command line; bad input is one line on stderr and exit code 2."""
    try:
        work(parse(sys.argv[1:] if argv is None else argv, command))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing is saved", file=sys.stderr)
        return 130
    return 0


def start(config: SupervisedConfig) -> tuple[PreTrainedTokenizerBase, int]:
    """Check the folders, seed everything; returns the tokenizer and the longest text in tokens."""
    folder = Path(config.output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"output: {folder} exists already; give a new folder")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if config.threads:
        torch.set_num_threads(config.threads)
    set_seed(config.seed)
    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, config.model)
    if tokenizer.eos_token_id is None:
        raise InputError(f"model: {config.model} names no EOS token to end a response with")
    text_config = _from_pretrained(AutoConfig, config.model).get_text_config()
    limits = (config.max_tokens, getattr(text_config, "max_position_embeddings", None))
    return tokenizer, min((limit for limit in limits if limit), default=sys.maxsize)


def load_model(auto: Any, source: str, **kwargs: Any) -> tuple[Any, set[str]]:
    """Load a model on the GPU if there is one; returns it and the names of its fresh weights."""
    model, report = _from_pretrained(auto, source, output_loading_info=True, **kwargs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.float().to(device), set(report["missing_keys"])


def _from_pretrained(auto: Any, source: str, **kwargs: Any) -> Any:
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"model: {source} is not a model folder (it has no config.json)")
    try:
        return auto.from_pretrained(source, **kwargs)
    except Exception as error:  # whatever the library, the network or the files do
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"model: cannot load {source!r}: {reason}") from None


def hold_out(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Split rows in those to train on and those held out, never a prompt in both.

    At least one prompt is held out unless `fraction` is 0.
    """
    prompts = list(dict.fromkeys(_prompt_key(row) for row in rows))
    if fraction == 0:
        return rows, []
    number = max(1, round(fraction * len(prompts)))
    if number >= len(prompts):
        raise InputError(
            f"eval_fraction: {fraction} of {len(prompts)} prompts leaves none to train on"
        )
    held = set(random.Random(seed).sample(prompts, number))
    parts: tuple[list[tuple[Conversation, ...]], list[tuple[Conversation, ...]]] = ([], [])
    for row in rows:
        parts[_prompt_key(row) in held].append(row)
    return parts


def _prompt_key(row: Sequence[Conversation]) -> str:
    return repr(row[0].prompt.content)


def read_and_encode(
    config: SupervisedConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    read: Callable[[str], Rows],
    source: str,
    eval_source: str | None,
) -> tuple[EncodedRows, EncodedRows, int]:
    """Read and encode what to train on and what is held out; returns how many are left out, too."""
    rows = read(source)
    if eval_source is None:
        rows, heldout = hold_out(rows, config.eval_fraction, config.seed)
    else:
        heldout = read(eval_source)
    encoded, dropped = encode_rows(tokenizer, rows, config, limit)
    encoded_heldout, more = encode_rows(tokenizer, heldout, config, limit)
    return encoded, encoded_heldout, dropped + more


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Rows, config: SupervisedConfig, limit: int
) -> tuple[EncodedRows, int]:
    """Encode the conversations of each row as PPO sees them; returns them, and how many are not.

    A prompt is encoded as by `encode_contents`, a response without special tokens, with EOS at its
    end.

    Raises:
        InputError: a conversation has more than `limit` tokens and `long_texts` is "error", or
            every row has one.
    """
    if not rows:
        return [], 0
    flat = [conversation for row in rows for conversation in row]
    examples = iter(encode_conversations(tokenizer, flat, config.system_prompt))
    encoded = [tuple(next(examples) for _ in row) for row in rows]
    longest = [max(map(len, row)) for row in encoded]
    long = [index for index, length in enumerate(longest) if length > limit]
    if long and (config.long_texts == "error" or len(long) == len(rows)):
        place = rows[long[0]][0].prompt.place
        raise InputError(
            f"{place}: prompt and response of {longest[long[0]]} tokens are over "
            f"the limit of {limit} (max_tokens); {len(long)} of {len(rows)} rows are"
            f"{'; long_texts=drop leaves them out' if len(long) < len(rows) else ''}"
        )
    kept = [row for row, length in zip(encoded, longest, strict=True) if length <= limit]
    return kept, len(long)


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], system: str | None
) -> list[Example]:
    """Encode prompts as PPO does, and their responses without special tokens, EOS at the end.

    Raises:
        InputError: as `encode_contents`; the last message of a prompt is the assistant's.
    """
    for asked in (conversation.prompt for conversation in conversations):
        if not isinstance(asked.content, str) and asked.content[-1]["role"] == "assistant":
            raise InputError(
                f"{asked.place}: the last message of the prompt is the assistant's, but the "
                "response is a turn of its own; end the prompt before it"
            )
    eos = tokenizer.eos_token_id
    prompts = encode_contents(
        tokenizer,
        [conversation.prompt.content for conversation in conversations],
        [conversation.prompt.place for conversation in conversations],
        system_prompt=system,
    )
    responses = [conversation.response for conversation in conversations]
    encoded = tokenizer(responses, truncation=False, verbose=False, add_special_tokens=False)
    examples = []
    for prompt, ids in zip(prompts, encoded["input_ids"], strict=True):
        end = next((i for i in range(len(ids), 0, -1) if ids[i - 1] != eos), 0)
        examples.append(Example(prompt, [*ids[:end], eos]))
    return examples


def save(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedConfig,
    figures: Mapping[str, float],
) -> None:
    """Write the model folder, whole or not at all, with the settings and figures of the run."""
    folder = Path(config.output)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        comments = "".join(f"# {name}: {figure:.6g}\n" for name, figure in figures.items())
        text = comments + dump(asdict(config))
        (partial / "training.yaml").write_text(text, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise InputError(f"output: cannot write {folder}: {error.strerror or error}") from None
