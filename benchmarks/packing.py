"""Measure what padding costs on responses of very different length.

    python benchmarks/packing.py [--rows 64] [--longest 256] [--json FILE]

Lengths are log-normal (median a tenth of the longest), cut at the longest, which one response has.
A Llama of hidden size 256, 4 layers and 32,000 tokens, and a critic of the same shape, take one
optimiser step on them in each way, in turn, `--repeats` times; the ratio is of medians. Real tokens
are counted, padding is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ppo.batch import Minibatch
from ppo.config import OptimConfig, PPOConfig
from ppo.critic import Critic
from ppo.learner import make_learner
from ppo.policy import Policy
from ppo.update import update

VOCABULARY, PROMPT, MICRO_ROWS = 32_000, 16, 8


def make_rows(rows: int, longest: int) -> Minibatch:
    """Random tokens with skewed lengths."""
    g = torch.Generator().manual_seed(0)
    spread = torch.empty(rows, 1).log_normal_(0.0, 1.0, generator=g)
    lengths = (spread * longest / 10).round().clamp(1, longest)
    lengths[0] = longest
    mask = torch.arange(longest) < lengths
    tokens = torch.randint(3, VOCABULARY, (rows, PROMPT + longest), generator=g)
    figures = torch.randn(4, rows, longest, generator=g) * mask
    return Minibatch(
        prompts=tokens[:, :PROMPT],
        prompt_mask=torch.ones(rows, PROMPT, dtype=torch.bool),
        responses=tokens[:, PROMPT:] * mask,
        response_mask=mask,
        old_logprobs=-10.0 * mask,
        ref_logprobs=-10.0 * mask,
        old_values=figures[1],
        advantages=figures[2],
        returns=figures[3],
    )


def make_step(packed: bool, ppo: PPOConfig, batch: Minibatch):
    """An optimiser step of actor and critic, ready to be called."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **shape)
    actor = Policy(LlamaForCausalLM(config).eval())
    critic = Critic(LlamaForCausalLM(config).eval().model, nn.Linear(256, 1))
    if packed:
        assert actor.pack() is critic.pack() is None
    optim, accelerator = OptimConfig(), Accelerator(cpu=not torch.cuda.is_available())
    learners = [
        make_learner(accelerator.prepare(model), list(model.parameters()), 1e-5, optim, 1000)
        for model in (actor, critic)
    ]
    rows = replace(batch)
    how = {"temperature": 1.0, "accelerator": accelerator, "impl": "auto", "packed": packed}
    return lambda: list(
        update(*learners, rows, ppo, optim, generator=torch.Generator().manual_seed(0), **how)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    batch = make_rows(options.rows, options.longest)
    real = int(batch.prompt_mask.sum() + batch.response_mask.sum())
    budget = MICRO_ROWS * (PROMPT + options.longest)
    once = {"ppo_epochs": 1, "num_minibatches": 1}
    by_rows = PPOConfig(**once, micro_batch_size=MICRO_ROWS)
    by_tokens = PPOConfig(**once, micro_batch_tokens=budget)
    ways = {
        f"padded, micro_batch_size {MICRO_ROWS}": make_step(False, by_rows, batch),
        f"padded, micro_batch_tokens {budget}": make_step(False, by_tokens, batch),
        f"packed, micro_batch_size {MICRO_ROWS}": make_step(True, by_rows, batch),
        f"packed, micro_batch_tokens {budget}": make_step(True, by_tokens, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):  # the first warms up
        for name, step in ways.items():
            start = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = next(iter(medians.values()))
    table = Table(title=f"{options.rows} rows, {real} real tokens")
    for column in ("way", "tokens/s", "ratio"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, seconds in medians.items():
        table.add_row(name, f"{real / seconds:,.0f}", f"{base / seconds:.2f}")
    Console().print(table)
    if options.json:
        found = {
            "rows": options.rows,
            "longest": options.longest,
            "real_tokens": real,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "tokens_per_s": {name: real / seconds for name, seconds in medians.items()},
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
