"""Measure parameters, bytes and peak memory of each way of sharing models.

    python benchmarks/sharing.py [--json FILE]

A Llama of hidden size 256, 4 layers and 32,000 tokens takes two PPO steps of 16 x 64 new tokens, in
a fresh process for each value of `models.sharing`, float32 on a CPU. Peak memory is that of the
whole process, libraries included.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

VOCABULARY = 32_000
# counts what is in memory, the shared once, and what trains
COUNT = """
import sys, torch
from ppo.config import parse_args
from ppo.models import load_models
m = load_models(parse_args(sys.argv[1:]))
parts = [m.actor, m.critic, m.ref, m.reward_model]
seen = {id(p): p for part in parts if part is not None for p in part.parameters()}
trained = m.actor.trained() + (m.critic.trained() if m.critic else list(m.value_head.parameters()))
print(sum(p.numel() for p in seen.values()), sum(p.numel() for p in trained))
"""


def make_models(folder: Path) -> dict[str, str]:
    """Save actor, reward model and prompts, from a seed."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w3"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    reward = LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))
    for name, model in (("actor", LlamaForCausalLM(LlamaConfig(**shape))), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"prompt": f"w{i} w{i + 1} w5"}) for i in range(6, 70)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return {
        "actor": str(folder / "actor"),
        "reward_model": str(folder / "reward"),
        "prompts": str(folder / "prompts.jsonl"),
    }


def measure(sources: dict[str, str], sharing: str, folder: Path) -> dict[str, Any]:
    """Run two steps, and count parameters in another process."""
    settings = {
        **sources,
        "models.sharing": sharing,
        "steps": 2,
        "rollout.batch_size": 16,
        "rollout.max_new_tokens": 64,
        "output_dir": folder / sharing,
        "checkpoint_every": 0,
    }
    flags = [f"--{key}={value}" for key, value in settings.items()]
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "ppo.train", *flags], **quiet)
    count = subprocess.run([sys.executable, "-c", COUNT, *flags], **quiet).stdout.split()
    (metrics,) = (folder / sharing).glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    return {
        "sharing": sharing,
        "parameters": int(count[0]),
        "trained": int(count[1]),
        "weights_bytes": 4 * int(count[0]),
        # gradient and two moments of AdamW
        "training_bytes": 12 * int(count[1]),
        "peak_memory_gb": last["perf/peak_memory_gb"],
        "seconds_per_step": last["time/step"],
    }


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = make_models(Path(folder))
        rows = [measure(sources, each, Path(folder)) for each in ("separate", "trunk", "lora")]
    table = Table("sharing", "parameters", "trained", "weights", "training", "peak", "s/step")
    for row in rows:
        table.add_row(
            row["sharing"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['trained'] / 1e6:.2f} M",
            f"{row['weights_bytes'] / 1e6:.0f} MB",
            f"{row['training_bytes'] / 1e6:.0f} MB",
            f"{row['peak_memory_gb']:.2f} GB",
            f"{row['seconds_per_step']:.2f}",
        )
    Console().print(table)
    if arguments.json:
        where = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
