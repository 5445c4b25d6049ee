"""What the demo is made of: its text, and how each of its models is trained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from ppo.demo.judge import vader
from ppo.demo.progress import BuildProgress
from ppo.demo.text import Preference, Review, split_prompts, write_preferences, write_reviews
from ppo.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID
from ppo.reward_model import (
    Pair,
    evaluate_reward_model,
    rescale_scores,
    score_all,
    train_reward_model,
)
from ppo.sft import Example, evaluate_sft, train_sft
from ppo.supervised import Schedule, right_pad


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is built."""

    seed: int = 0
    heldout_prompts: int = 128
    reviews: int = 12_800
    heldout_reviews: int = 512
    pairs: int = 4_480
    heldout_pairs: int = 400
    vocab_size: int = 2_048
    max_positions: int = 160
    hidden_size: int = 128
    intermediate_size: int = 344
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    batch_size: int = 32
    sft_steps: int = 400
    sft_lr: float = 4e-3
    reward_epochs: int = 1
    reward_lr: float = 2e-3
    center_coef: float = 0.01


@dataclass(frozen=True)
class Corpus:
    """The text of the demo; held-out text has prompts that occur nowhere else."""

    prompts: list[str]
    heldout_prompts: list[str]
    reviews: list[Review]
    heldout_reviews: list[Review]
    pairs: list[Preference]
    heldout_pairs: list[Preference]


def write_corpus(settings: Settings) -> Corpus:
    """Write all text of the demo; the same settings give the same text."""
    train, heldout = split_prompts(settings.heldout_prompts, settings.seed)
    seed = settings.seed
    return Corpus(
        prompts=[prompt.text for prompt in train],
        heldout_prompts=[prompt.text for prompt in heldout],
        reviews=write_reviews(train, settings.reviews, f"reviews {seed}"),
        heldout_reviews=write_reviews(heldout, settings.heldout_reviews, f"held-out {seed}"),
        pairs=write_preferences(train, settings.pairs, f"pairs {seed}", vader),
        heldout_pairs=write_preferences(
            heldout, settings.heldout_pairs, f"held-out pairs {seed}", vader
        ),
    )


def model_config(settings: Settings, vocab_size: int) -> LlamaConfig:
    """Describe the decoder that all four models share."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.max_positions,
        # Tied, as many steps leave 10-16 % of the samples with a broken sentence, untied 7 %.
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def make_actor(
    config: LlamaConfig,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    progress: BuildProgress,
    figures: dict[str, float],
) -> LlamaForCausalLM:
    """Teach a fresh language model to write reviews."""
    start = time.perf_counter()
    actor = LlamaForCausalLM(config)
    heldout = encode_reviews(tokenizer, corpus.heldout_reviews)
    before = evaluate_sft(actor, heldout, batch_size=64)
    with progress.stage("actor, supervised warm-up", settings.sft_steps) as on_step:
        train_sft(
            actor,
            encode_reviews(tokenizer, corpus.reviews),
            steps=settings.sft_steps,
            batch_size=settings.batch_size,
            schedule=Schedule(lr=settings.sft_lr),
            seed=settings.seed,
            on_step=on_step,
        )
    after = evaluate_sft(actor, heldout, batch_size=64)
    seconds = time.perf_counter() - start
    figures |= {
        "actor/parameters": actor.num_parameters(),
        "actor/heldout_loss_before": before,
        "actor/heldout_loss": after,
        "seconds/actor": seconds,
    }
    progress.say(
        f"actor: Llama of {actor.num_parameters() / 1e6:.2f}M parameters, held-out loss "
        f"{before:.2f} -> {after:.2f} nats per token ({seconds:.1f} s)"
    )
    return actor


def make_reward_model(
    actor: LlamaForCausalLM,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    progress: BuildProgress,
    figures: dict[str, float],
) -> Any:
    """Train a reward model from the actor's trunk; its scores of reviews get SD 1."""
    start = time.perf_counter()
    reward_model = _with_one_label(LlamaForSequenceClassification, actor)
    pairs = encode_pairs(tokenizer, corpus.pairs)
    steps = settings.reward_epochs * (len(pairs) // settings.batch_size)
    with progress.stage("reward model, preferences", steps) as on_step:
        train_reward_model(
            reward_model,
            pairs,
            epochs=settings.reward_epochs,
            batch_size=settings.batch_size,
            schedule=Schedule(lr=settings.reward_lr),
            seed=settings.seed,
            center_coef=settings.center_coef,
            on_step=on_step,
        )
    heldout = encode_pairs(tokenizer, corpus.heldout_pairs)
    accuracy = evaluate_reward_model(reward_model, heldout, batch_size=64)
    reviews = encode_reviews(tokenizer, corpus.heldout_reviews)
    scores = score_all(reward_model, [[*e.prompt, *e.response] for e in reviews], batch_size=64)
    deviation = rescale_scores(reward_model, scores)
    figures["seconds/reward_model"] = seconds = time.perf_counter() - start
    figures |= {
        "reward_model/heldout_accuracy": accuracy,
        "reward_model/score_sd_before_scaling": deviation,
        "reward_model/score_mean": float(scores.mean()) / deviation,
        "reward_model/judge_correlation": _judge_correlation(scores, corpus.heldout_reviews),
    }
    progress.say(
        f"reward model: right on {accuracy:.1%} of {len(heldout)} held-out pairs ({seconds:.1f} s)"
    )
    return reward_model


@torch.no_grad()
def make_critic(reward_model: Any, reviews: Sequence[Example], figures: dict[str, float]) -> Any:
    """Start the critic as the reward model, with a bias that gives its values the scores' mean."""
    critic = _with_one_label(LlamaForTokenClassification, reward_model)
    critic.score.weight.copy_(reward_model.score.weight)
    critic.score.bias.zero_()
    ids, mask = right_pad([[*e.prompt, *e.response] for e in reviews], PAD_ID)
    values = critic(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
    columns = torch.arange(ids.shape[1])
    prompt_lengths = torch.tensor([len(e.prompt) for e in reviews])[:, None]
    last = mask.sum(1, keepdim=True) - 1
    # V(s_t) is read at the token before the response's t-th one, so never at the last token.
    states = (columns >= prompt_lengths - 1) & (columns < last)
    scores = values.gather(1, last)
    critic.score.bias.fill_(float(scores.mean() - values[states].mean()))
    values = values + critic.score.bias
    errors = (scores - values)[states]
    spread = scores.expand_as(values)[states]
    figures["critic/explained_variance"] = float(1 - errors.var() / spread.var())
    return critic


def _with_one_label(architecture: Any, source: Any) -> Any:
    """Put a fresh scalar head on a copy of the trunk of `source`."""
    settings = {**source.config.to_dict(), "num_labels": 1, "classifier_dropout": 0.0}
    model = architecture(LlamaConfig.from_dict(settings)).eval()
    model.model.load_state_dict(source.model.state_dict())
    return model


def encode_reviews(tokenizer: PreTrainedTokenizerFast, reviews: Sequence[Review]) -> list[Example]:
    """Encode prompts with <bos> in front, and responses with <eos> at their end."""
    prompts = tokenizer([review.prompt for review in reviews])["input_ids"]
    responses = tokenizer([review.response for review in reviews], add_special_tokens=False)
    return [
        Example(prompt, [*response, EOS_ID])
        for prompt, response in zip(prompts, responses["input_ids"], strict=True)
    ]


def encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Preference]) -> list[Pair]:
    """Encode both texts of each pair, from <bos> to <eos>."""
    chosen = encode_reviews(tokenizer, [Review(p.prompt, p.chosen) for p in pairs])
    rejected = encode_reviews(tokenizer, [Review(p.prompt, p.rejected) for p in pairs])
    return [
        Pair([*good.prompt, *good.response], [*bad.prompt, *bad.response])
        for good, bad in zip(chosen, rejected, strict=True)
    ]


def _judge_correlation(scores: torch.Tensor, reviews: Sequence[Review]) -> float:
    judged = vader([r.prompt for r in reviews], [r.response for r in reviews])
    return float(torch.corrcoef(torch.stack([scores, torch.tensor(judged)]))[0, 1])
