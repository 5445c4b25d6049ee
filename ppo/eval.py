"""`python -m ppo.eval RUN`: what held-out prompts say of a trained actor and of its reference."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ppo.batch import Rollout, join, split
from ppo.config import Config
from ppo.data import EncodedPrompts
from ppo.generate import guarded, open_run, read_run_prompts, sample
from ppo.model_folders import load_model, load_tokenizer
from ppo.models import Models
from ppo.policy import Policy
from ppo.reward_sources import load_reward_functions
from ppo.rewards import load_function
from ppo.schema import InputError
from ppo.scoring import score
from ppo.trainer import make_sampling

RESAMPLES = 10_000


@dataclass(frozen=True)
class Figure:
    """A mean over prompts, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """Figures of both models by name; `prompts` is the number that intervals are over."""

    prompts: int
    samples: int
    actor: dict[str, Figure]
    reference: dict[str, Figure]
    difference: dict[str, Figure]
    """Actor minus reference on the same prompts."""
    win_rate: Figure
    """Share of pairs in which the actor's response scores higher; a tie counts half."""
    kl: Figure
    """Σ_t log π(a_t) − log π_ref(a_t) over the actor's responses, nats."""


def interval(values: Tensor, *, seed: int = 0) -> Figure:
    """Estimate a mean and its 95 % interval by the percentile bootstrap.

    Prompts are drawn again with replacement, 10,000 times; the interval holds the middle 95 % of
    the means. Of few prompts (below about 20) it is somewhat too narrow; of one it is NaN.

    Args:
        values: [n], one independent value for each prompt, n ≥ 1.
        seed: of the resampling.

    Raises:
        ValueError: values is empty or not one-dimensional.

    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    if values.dim() != 1 or len(values) == 0:
        raise ValueError(f"values must have shape [n] with n >= 1, got {list(values.shape)}")
    values = values.double().cpu()
    if len(values) == 1:
        return Figure(float(values), math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    means = torch.empty(RESAMPLES, dtype=torch.float64)
    step = max(1, 10_000_000 // len(values))  # at most 80 MB of indices at a time
    for start in range(0, RESAMPLES, step):
        part = means[start : start + step]
        picks = torch.randint(len(values), (len(part), len(values)), generator=generator)
        part.copy_(values[picks].mean(1))
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Figure(float(values.mean()), low, high)


def with_reward_model(config: Config, models: Models) -> Models:
    """Load the run's reward model beside its policies."""
    if config.reward_model is None:
        return models
    model = load_model(
        AutoModelForSequenceClassification,
        "reward_model",
        config.reward_model,
        dtype=getattr(torch, config.dtype),
    ).requires_grad_(False)
    device = next(models.actor.parameters()).device
    tokenizer = load_tokenizer("reward_model", config.reward_model)
    return replace(models, reward_model=model.to(device), reward_tokenizer=tokenizer)


def evaluate(
    config: Config, models: Models, prompts: EncodedPrompts, *, samples: int = 1, seed: int = 0
) -> Evaluation:
    """Score responses of actor and reference to the same prompts.

    Scores are those of the run's reward sources with their weights, not shaped. A prompt with
    several samples counts once, with their mean: intervals are over prompts, which are independent
    where samples of one prompt are not.

    Args:
        config: of the run.
        models: with the reward model, where the run has one.
        prompts: n held-out prompts.
        samples: responses to each, k.
        seed: of the sampling and of the intervals.

    Raises:
        InputError: a reward source fails.
    """
    actor, ref = (
        _respond(config, models, policy, prompts, samples, seed)
        for policy in (models.actor, models.ref)
    )
    kl = actor.pop("kl")
    ours, theirs = actor["score"], ref["score"]
    wins = (ours > theirs).double() + 0.5 * (ours == theirs).double()

    def figures(values: dict[str, Tensor]) -> dict[str, Figure]:
        return {name: interval(value.mean(1), seed=seed) for name, value in values.items()}

    return Evaluation(
        prompts=len(prompts),
        samples=samples,
        actor=figures(actor),
        reference=figures(ref),
        difference=figures({name: value - ref[name] for name, value in actor.items()}),
        win_rate=interval(wins.mean(1), seed=seed),
        kl=interval(kl.mean(1), seed=seed),
    )


def _respond(
    config: Config,
    models: Models,
    policy: Policy,
    prompts: EncodedPrompts,
    samples: int,
    seed: int,
) -> dict[str, Tensor]:
    """Figures of one model for each prompt and sample, [n,k]; the actor's KL among them."""
    functions = load_reward_functions(
        config.reward_functions, timeout=config.reward_timeout, retries=config.reward_retries
    )
    judge = load_function(config.judge, "judge") if config.judge else None
    sampling = make_sampling(config, models)
    rows: dict[str, list[Tensor]] = {}
    size = max(1, config.rollout.batch_size // samples)
    for start in range(0, len(prompts), size):
        part = prompts.take(range(start, min(start + size, len(prompts))), samples)
        rollout = sample(policy, models, sampling, part, seed + start)
        scored = score(config, models, functions, rollout, part)
        found = {"score": scored.scores, "length": rollout.response_mask.sum(1)}
        if judge is not None:
            verdicts = judge(
                [each.prompt for each in scored.samples], [each.response for each in scored.samples]
            )
            found["judge"] = torch.as_tensor(verdicts)
        if policy is models.actor:
            found["kl"] = kl_of(config, models, rollout)
        for name, value in found.items():
            rows.setdefault(name, []).append(value.double().cpu().view(-1, samples))
    return {name: torch.cat(parts) for name, parts in rows.items()}


@torch.no_grad()
def kl_of(config: Config, models: Models, rollout: Rollout) -> Tensor:
    """Sum log π(a_t) − log π_ref(a_t) over each response, [B] nats (estimator k1)."""
    sums = []
    ppo = config.ppo
    for rows, part in split(rollout, ppo.micro_batch_size, ppo.micro_batch_tokens):
        tokens = (part.prompts, part.prompt_mask, part.responses, part.response_mask)
        ours, theirs = (
            policy(*tokens, temperature=config.rollout.temperature, impl=config.impl).logprobs
            for policy in (models.actor, models.ref)
        )
        sums.append((rows, (ours - theirs).sum(1)))
    return join(sums)


def show(found: Evaluation, console: Console) -> None:
    """Print the figures as a table."""
    title = f"{found.prompts} prompts x {found.samples}, mean and 95 % interval"
    table = Table(box=box.HORIZONTALS, title=title, title_justify="left")
    for name in ("", "reference", "actor", "difference"):
        table.add_column(name)
    for name in found.actor:
        columns = (found.reference, found.actor, found.difference)
        table.add_row(name, *(str(column[name]) for column in columns))
    table.add_row("win rate", "", str(found.win_rate), "")
    table.add_row("KL, nats", "", str(found.kl), "")
    console.print(table)


def as_json(found: Evaluation) -> str:
    """Write every figure; an interval that does not exist becomes null."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(asdict(found)), indent=1)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m ppo.eval", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="folder of a run, with its actor/")
    parser.add_argument(
        "--prompts", metavar="FILE", help="held-out prompts; default: the run's eval_prompts"
    )
    parser.add_argument("--count", type=int, help="the first so many of them; default: all")
    parser.add_argument("--samples", type=int, default=1, help="responses to each, default 1")
    parser.add_argument("--seed", type=int, default=0, help="fixes the figures, default 0")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str]) -> None:
    """Evaluate and print."""
    options = make_parser().parse_args(argv)
    for name in ("count", "samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    config, models = open_run(options.run)
    source = options.prompts or config.eval_prompts
    if source is None:
        raise InputError("the run names no eval_prompts; give held-out prompts with --prompts")
    prompts = read_run_prompts(config, models.tokenizer, [], source, count=options.count)
    models = with_reward_model(config, models)
    found = evaluate(config, models, prompts, samples=options.samples, seed=options.seed)
    if options.json:
        print(as_json(found))
    else:
        show(found, Console())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return guarded(run, argv)


if __name__ == "__main__":
    sys.exit(main())
