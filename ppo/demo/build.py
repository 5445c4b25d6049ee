"""Build the embedded demo: text, tokenizer, and the four models that PPO starts from.

Every folder that it writes is an ordinary Hugging Face one, so that the trainer treats the demo
like any user's models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ppo.config import InputError
from ppo.demo.cache import build_key, read_manifest, staged, write_manifest
from ppo.demo.progress import BuildProgress
from ppo.demo.recipe import (
    Corpus,
    Settings,
    encode_reviews,
    make_actor,
    make_critic,
    make_reward_model,
    model_config,
    write_corpus,
)
from ppo.demo.tokenizer import train_tokenizer

PACKAGES = ("torch", "transformers", "tokenizers", "vaderSentiment")


@dataclass(frozen=True)
class DemoFiles:
    """The finished demo: model folders, prompt files, and the figures of its build."""

    actor: Path
    ref: Path
    critic: Path
    reward_model: Path
    prompts: Path
    eval_prompts: Path
    figures: dict[str, float]


def build_demo(
    demo_dir: Path | None,
    *,
    console: Console | None = None,
    settings: Settings | None = None,
) -> DemoFiles:
    """Return the demo's files, building them on first use.

    Args:
        demo_dir: where builds are kept; None is the user's cache folder. Each build has a folder of
            its own there, named after its settings and the code that made it.
        console: where progress is shown; None is standard output.
        settings: what to build; None is the demo that `python -m ppo.train` uses.

    Returns:
        The paths of the four models and the prompts, and the figures of the build. The same
        settings, library versions and number of threads give the same bytes.

    Raises:
        InputError: `demo_dir` cannot be written.
    """
    settings = settings or Settings()
    root = demo_dir.expanduser() if demo_dir else user_cache_path("ppo-kernels") / "demo"
    folder = root / build_key(asdict(settings), _sources())
    if read_manifest(folder) is None:
        progress = BuildProgress(console or Console())
        progress.say(f"building the demo's models, once, into {folder}")
        try:
            with staged(folder) as temporary, _quiet_and_seeded(settings.seed):
                _build(temporary, settings, progress)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"demo_dir: cannot build the demo in {root}: {reason}") from error
    record = read_manifest(folder)
    if record is None:
        raise RuntimeError(f"{folder} was changed while it was built: start again")
    return DemoFiles(
        actor=folder / "actor",
        ref=folder / "reference",
        critic=folder / "critic",
        reward_model=folder / "reward_model",
        prompts=folder / "prompts.jsonl",
        eval_prompts=folder / "prompts_heldout.jsonl",
        figures=record["figures"],
    )


def _build(folder: Path, settings: Settings, progress: BuildProgress) -> None:
    start = time.perf_counter()
    corpus = write_corpus(settings)
    _save_corpus(folder, corpus)
    tokenizer = train_tokenizer(
        (review.prompt + review.response for review in corpus.reviews),
        vocab_size=settings.vocab_size,
        max_length=settings.max_positions,
    )
    seconds = time.perf_counter() - start
    progress.say(
        f"text: {len(corpus.reviews):,} reviews, {len(corpus.pairs):,} preference pairs, "
        f"a tokenizer of {len(tokenizer):,} tokens ({seconds:.1f} s)"
    )
    figures: dict[str, float] = {"tokenizer/tokens": len(tokenizer), "seconds/text": seconds}
    config = model_config(settings, len(tokenizer))
    actor = make_actor(config, corpus, tokenizer, settings, progress, figures)
    reward_model = make_reward_model(actor, corpus, tokenizer, settings, progress, figures)
    critic = make_critic(reward_model, encode_reviews(tokenizer, corpus.heldout_reviews), figures)
    models: dict[str, PreTrainedModel] = {
        "actor": actor,
        "reference": actor,
        "critic": critic,
        "reward_model": reward_model,
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    figures["seconds/total"] = time.perf_counter() - start
    record: dict[str, Any] = {"settings": asdict(settings), "figures": figures}
    record["versions"] = {name: version(name) for name in PACKAGES}
    write_manifest(folder, {**record, "threads": torch.get_num_threads()})


def _save_corpus(folder: Path, corpus: Corpus) -> None:
    prompts = ({"prompt": text} for text in corpus.prompts)
    heldout = ({"prompt": text} for text in corpus.heldout_prompts)
    _write_jsonl(folder / "prompts.jsonl", prompts)
    _write_jsonl(folder / "prompts_heldout.jsonl", heldout)
    _write_jsonl(folder / "sft.jsonl", map(asdict, corpus.reviews))
    _write_jsonl(folder / "preferences.jsonl", map(asdict, corpus.pairs))
    _write_jsonl(folder / "preferences_heldout.jsonl", map(asdict, corpus.heldout_pairs))


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _sources() -> list[Path]:
    """The code that decides what is built: a change of it makes a new build."""
    package = Path(__file__).parent
    own = sorted(package.glob("*.py"))
    return own + [package.parent / f"{name}.py" for name in ("sft", "reward_model", "supervised")]


@contextmanager
def _quiet_and_seeded(seed: int) -> Iterator[None]:
    """Silence transformers and seed torch's CPU generator; both are as before afterwards."""
    logging: Any = transformers_logging  # its functions carry no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the generators of every GPU.
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
