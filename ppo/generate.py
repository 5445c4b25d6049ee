"""`python -m ppo.generate RUN`: responses of a trained actor beside those of its reference."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ppo.adapters import ACTOR, REFERENCE, activate, base_of_adapter, load_adapters
from ppo.batch import Rollout
from ppo.config import Config, parse_args
from ppo.data import EncodedPrompts, encode_prompts, left_pad
from ppo.model_folders import load_model, load_tokenizer
from ppo.models import Models
from ppo.policy import Policy
from ppo.prompt_files import Prompt, read_prompts
from ppo.report_tables import Printer
from ppo.rollout import Sampling, generate
from ppo.run_folder import CONFIG
from ppo.schema import InputError
from ppo.trainer import make_sampling

SHOWN = 5
"""Prompts that are taken from the run's own files where none are given."""


def open_run(run: Path) -> tuple[Config, Models]:
    """Load the settings of a run, its trained actor and its reference; no critic, no reward model.

    An actor that is a LoRA adapter shares its base with the reference, which is that base with the
    adapter off.

    Raises:
        InputError: the folder holds no run, no actor, or models that cannot be loaded.
    """
    if not (run / CONFIG).is_file():
        raise InputError(f"{run} is not the folder of a run (it has no {CONFIG})")
    folder = run / "actor"
    if not folder.is_dir():
        raise InputError(f"{run} has no trained actor yet (no folder {folder})")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = parse_args(["--config", str(run / CONFIG)])
    tokenizer = load_tokenizer("actor", str(folder))
    dtype = getattr(torch, config.dtype)
    base = base_of_adapter(str(folder))
    model = load_model(AutoModelForCausalLM, "actor", base or str(folder), dtype=dtype)
    if base:
        shared = load_adapters(model, {ACTOR: folder})
        actor, ref = Policy(shared, adapter=ACTOR), Policy(shared, adapter=REFERENCE)
    else:
        source = config.ref or config.actor
        if source is None:
            raise InputError(f"{run / CONFIG} names no reference")
        actor = Policy(model)
        ref = Policy(load_model(AutoModelForCausalLM, "ref", source, dtype=dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    actor, ref = actor.requires_grad_(False).to(device), ref.requires_grad_(False).to(device)
    return config, Models(actor, None, ref, None, tokenizer, None, None)


def read_run_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    source: str | None,
    *,
    count: int | None,
) -> EncodedPrompts:
    """Encode texts, or the first prompts of a file, as training does.

    Raises:
        InputError: neither texts nor a file are given, or a prompt cannot be read or encoded.
    """
    if texts:
        prompts, name = [Prompt(text, "--prompt") for text in texts], "--prompt"
    elif source is not None:
        prompts, name = read_prompts(source, config.prompt_column)[:count], source
    else:
        raise InputError("the run names no prompts; give some with --prompt or --prompts")
    return encode_prompts(
        tokenizer,
        prompts,
        config.rollout.max_prompt_tokens,
        config.rollout.long_prompts,
        name,
        system_prompt=config.system_prompt if not texts else None,
        continue_assistant=config.rollout.continue_assistant,
    )


def sample(
    policy: Policy, models: Models, sampling: Sampling, prompts: EncodedPrompts, seed: int
) -> Rollout:
    """Sample a response to each prompt; a seed fixes them, and other random numbers stay."""
    ids, mask = left_pad(prompts.rows, models.pad_id)
    device = next(policy.parameters()).device
    activate(policy.model, policy.adapter)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return generate(policy.model, ids.to(device), mask.to(device), sampling, models.tokenizer)


def texts_of(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The responses as text, special tokens left out."""
    pairs = zip(rollout.responses, rollout.response_mask, strict=True)
    return [str(tokenizer.decode(row[keep], skip_special_tokens=True)) for row, keep in pairs]


@dataclass(frozen=True)
class Answers:
    """One prompt, and a response of each model."""

    prompt: str
    reference: str
    actor: str


def answers(
    models: Models, sampling: Sampling, prompts: EncodedPrompts, *, seed: int, batch_size: int
) -> Iterator[Answers]:
    """Sample from reference and actor, a batch at a time, with the same random numbers."""
    for start in range(0, len(prompts), batch_size):
        part = prompts.take(range(start, min(start + batch_size, len(prompts))))
        found = [
            texts_of(models.tokenizer, sample(policy, models, sampling, part, seed + start))
            for policy in (models.ref, models.actor)
        ]
        decoded = [str(models.tokenizer.decode(row, skip_special_tokens=True)) for row in part.rows]
        for row in zip(decoded, *found, strict=True):
            yield Answers(*row)


def show(rows: Sequence[Answers], console: Console) -> None:
    """Print prompts with both responses."""
    printer = Printer(console)
    table = printer.table("samples", "prompt", "reference", "actor", expand=True, show_lines=True)
    for column, ratio in zip(table.columns, (2, 3, 3), strict=True):
        column.ratio = ratio
    for row in rows:
        table.add_row(*map(printer.cell, (row.prompt, row.reference, row.actor)))
    console.print(table)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo.generate", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="folder of a run, with its actor/")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", nargs="+", default=[], metavar="TEXT", help="prompts")
    given.add_argument(
        "--prompts", metavar="FILE", help="file of prompts; default: the run's held-out ones"
    )
    parser.add_argument("--count", type=int, help=f"prompts of a file, default {SHOWN}")
    parser.add_argument("--max-new-tokens", type=int, help="default: as in training")
    parser.add_argument("--temperature", type=float, help="default: as in training")
    parser.add_argument("--seed", type=int, default=0, help="fixes the samples, default 0")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    return parser


def with_changes(config: Config, **changes: float | None) -> Config:
    """The run's settings with other sampling; None leaves a field as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    rollout = replace(config.rollout, **given)  # type: ignore[arg-type]  # checked at run time
    return replace(config, rollout=rollout)


def run(argv: Sequence[str]) -> None:
    """Sample and print."""
    options = make_parser().parse_args(argv)
    if options.count is not None and options.count < 1:
        raise InputError(f"count must be at least 1, got {options.count}")
    config, models = open_run(options.run)
    changes = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    config = with_changes(config, min_new_tokens=_at_most(config, options), **changes)
    prompts = read_run_prompts(
        config,
        models.tokenizer,
        options.prompt,
        options.prompts or config.eval_prompts or config.prompts,
        count=options.count or SHOWN,
    )
    rows = answers(
        models,
        make_sampling(config, models),
        prompts,
        seed=options.seed,
        batch_size=config.rollout.batch_size,
    )
    if options.json:
        for row in rows:
            print(json.dumps(vars(row), ensure_ascii=False))
    else:
        show(list(rows), Console())


def _at_most(config: Config, options: argparse.Namespace) -> int:
    """`min_new_tokens`, lowered where fewer tokens are asked for."""
    asked: int = options.max_new_tokens or config.rollout.max_new_tokens
    return min(config.rollout.min_new_tokens, asked)


def guarded(work: Callable[[Sequence[str]], None], argv: Sequence[str] | None) -> int:
    """Run a command line; bad input is one line on stderr and exit code 2."""
    try:
        work(sys.argv[1:] if argv is None else argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
