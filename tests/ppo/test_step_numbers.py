"""One full PPO step against a calculation in float64, written row by row from the papers.

Nothing here comes from `ppo_kernels` or from the trainer's formulas: rewards, GAE, whitening,
losses, gradient clipping and AdamW are spelled out. Shared are only the weights at the start, the
sampled tokens, the scores, and the order of the minibatches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from ppo.batch import Rollout
from ppo.config import Config, parse_args
from ppo.data import encode_prompts
from ppo.models import load_models
from ppo.prompt_files import read_prompts
from ppo.train import ppo_step
from ppo.trainer import Trainer, prepare
from tests.ppo.conftest import llama_config

PROMPTS = [[1, 5, 6], [1, 5, 6], [1, 9], [1, 9]]
RESPONSES = [[7, 8, 2], [9, 4, 5, 6, 11], [12, 2], [20, 21, 22, 2]]
FINISHED = [True, False, True, True]
SCORES = [0.7, -1.9, 2.4, 0.1]
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one row at a time": {"ppo.micro_batch_size": 1},
    "KL k3 in the loss": {"ppo.kl_estimator": "k3", "ppo.kl_in_loss": True},
    "k2 in the reward": {"ppo.kl_estimator": "k2"},
    "exact KL in the reward": {"ppo.kl_estimator": "exact"},
    "exact KL in the loss": {"ppo.kl_estimator": "exact", "ppo.kl_in_loss": True},
    "clip-higher, dual clip, entropy": {
        "ppo.cliprange": 0.05,
        "ppo.cliprange_high": 0.1,
        "ppo.dual_clip": 1.01,
        "ppo.cliprange_value": "null",
        "ppo.entropy_coef": 0.05,
    },
    "bootstrap": {"ppo.bootstrap_truncated": True, "ppo.gamma": 0.9, "ppo.gae_lambda": 0.8},
    "sequence means": {"ppo.loss_agg_mode": "seq-mean-token-mean", "ppo.vf_coef": 0.3},
    "sequence sums": {"ppo.loss_agg_mode": "seq-mean-token-sum", "ppo.micro_batch_size": 1},
    "shaped scores": {
        "ppo.score_clip": 1.5,
        "ppo.length_penalty_alpha": 0.5,
        "ppo.score_normalization": "batch",
        "ppo.missing_eos_penalty": 0.4,
    },
    "raw advantages": {"ppo.whiten_advantages": False, "rollout.temperature": 0.7},
    "one norm": {"optim.clip_jointly": True, "optim.max_grad_norm": 0.1},
    "rloo": {"ppo.advantage_estimator": "rloo"},
    "grpo": {"ppo.advantage_estimator": "grpo"},
    "reinforce++": {"ppo.advantage_estimator": "reinforce_pp"},
    "trunk": {"models.sharing": "trunk"},
    "trunk, value gradient": {"models.sharing": "trunk", "models.value_gradient": True},
}


def rollout() -> Rollout:
    width = max(map(len, RESPONSES))
    prompts = torch.tensor([[0] * (3 - len(p)) + p for p in PROMPTS])
    responses = torch.tensor([r + [0] * (width - len(r)) for r in RESPONSES])
    mask = torch.tensor([[True] * len(r) + [False] * (width - len(r)) for r in RESPONSES])
    return Rollout(prompts, prompts != 0, responses, mask, torch.tensor(FINISHED))


def by_response(model: object, sequences: Tensor, mask: Tensor) -> Tensor:
    rows = [row[keep].tolist() for row, keep in zip(sequences, mask, strict=True)]
    known = list(zip(RESPONSES, SCORES, strict=True))
    return torch.tensor([next(s for r, s in known if row[-len(r) :] == r) for row in rows])


@pytest.fixture
def trainer(
    folders: dict[str, str], save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Trainer]:
    torch.manual_seed(5)
    ref = save(LlamaForCausalLM(llama_config()), "ref")
    monkeypatch.setattr("ppo.trainer.generate", lambda *_: rollout())
    monkeypatch.setattr("ppo.scoring.score_tokens", by_response)

    def make(**changes: Any) -> Trainer:
        settings = {
            **folders,
            "ref": ref,
            "rollout.batch_size": 2,
            "rollout.samples_per_prompt": 2,
            "optim.actor_lr": 2e-3,
            "optim.critic_lr": 4e-3,
            "optim.weight_decay": 0.1,
            "ppo.kl_coef": 0.1,
            **changes,
        }
        config = parse_args([f"--{key}={value}" for key, value in settings.items()])
        set_seed(0)
        return prepare(config, load_models(config))

    return make


@dataclass
class Oracle:
    """The same start in float64, and the step by hand."""

    config: Config
    actor: Any
    ref: Any
    critic: Any
    head: Any

    def look(self, model: Any, row: int) -> tuple[Tensor, Tensor]:
        """All log-probabilities before each token of the response, and the hidden states."""
        ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
        hidden = model.model(input_ids=ids).last_hidden_state[0, len(PROMPTS[row]) - 1 :]
        logits = model.lm_head(hidden) / self.config.rollout.temperature
        return logits[:-1].log_softmax(-1), hidden

    def values(self, row: int, hidden: Tensor) -> Tensor | None:
        """V before each token and after the last."""
        if self.config.ppo.advantage_estimator != "gae":
            return None
        if self.critic is not None:
            ids = torch.tensor([PROMPTS[row] + RESPONSES[row]])
            hidden = self.critic(input_ids=ids).last_hidden_state[0, len(PROMPTS[row]) - 1 :]
        elif not self.config.models.value_gradient:
            hidden = hidden.detach()
        return self.head(hidden)[:, 0]

    def kl(self, log_p: Tensor, log_ref: Tensor, tokens: list[int]) -> Tensor:
        if self.config.ppo.kl_estimator == "exact":
            return (log_p.exp() * (log_p - log_ref)).sum(-1)
        delta = picked(log_p, tokens) - picked(log_ref, tokens)
        forms = {"k1": delta, "k2": delta**2 / 2, "k3": (-delta).exp() - 1 + delta}
        return forms[self.config.ppo.kl_estimator]


def picked(log_p: Tensor, tokens: list[int]) -> Tensor:
    return log_p[range(len(tokens)), tokens]


def shaped(config: Config) -> list[float]:
    ppo, scores = config.ppo, list(SCORES)
    if ppo.score_clip is not None:
        scores = [max(-ppo.score_clip, min(ppo.score_clip, s)) for s in scores]
    lengths = map(len, RESPONSES)
    scores = [
        s - abs(s) * (1 - n**-ppo.length_penalty_alpha)
        for s, n in zip(scores, lengths, strict=False)
    ]
    if ppo.score_normalization == "batch":
        mean = sum(scores) / 4
        spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / 3 + 1e-8)
        scores = [(s - mean) / spread for s in scores]
    return [s - ppo.missing_eos_penalty * (not f) for s, f in zip(scores, FINISHED, strict=False)]


def gae_of(config: Config, rewards: list[float], values: list[float], after: float) -> list[float]:
    advantages, running = [], 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else after
        delta = rewards[t] + config.ppo.gamma * following - values[t]
        running = delta + config.ppo.gamma * config.ppo.gae_lambda * running
        advantages.insert(0, running)
    return advantages


def group_advantages(config: Config, rewards: list[list[float]]) -> list[list[float]]:
    totals = [sum(row) for row in rewards]
    result = []
    for i, row in enumerate(rewards):
        other = totals[i ^ 1]
        if config.ppo.advantage_estimator == "rloo":
            result.append([totals[i] - other] * len(row))
        elif config.ppo.advantage_estimator == "grpo":
            mean = (totals[i] + other) / 2
            spread = math.sqrt((totals[i] - mean) ** 2 + (other - mean) ** 2)
            result.append([(totals[i] - mean) / (spread + 1e-4)] * len(row))
        else:
            result.append([sum(row[t:]) for t in range(len(row))])
    return result


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


@dataclass
class Start:
    """What is fixed before the updates, by row."""

    old: list[Tensor]
    values: list[Tensor | None]
    advantages: list[list[float]]
    returns: list[list[float]]
    kl: list[float]


@torch.no_grad()
def start(oracle: Oracle) -> Start:
    config, scores = oracle.config, shaped(oracle.config)
    old, values, rewards, kls = [], [], [], []
    for row, tokens in enumerate(RESPONSES):
        log_p, hidden = oracle.look(oracle.actor, row)
        kl = oracle.kl(log_p, oracle.look(oracle.ref, row)[0], tokens)
        charge = 0.0 if config.ppo.kl_in_loss else config.ppo.kl_coef
        reward = (-charge * kl).tolist()
        reward[-1] += scores[row]
        old.append(picked(log_p, tokens))
        values.append(oracle.values(row, hidden))
        rewards.append(reward)
        kls.append(float(kl.sum()))
    if config.ppo.advantage_estimator != "gae":
        advantages = group_advantages(config, rewards)
        if config.ppo.advantage_estimator == "reinforce_pp":
            advantages = whitened(advantages)
        return Start(old, values, advantages, advantages, kls)
    advantages, returns = [], []
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        goes_on = config.ppo.bootstrap_truncated and not FINISHED[row]
        v = value.tolist()
        advantages.append(gae_of(config, reward, v, v[-1] if goes_on else 0.0))
        returns.append([a + x for a, x in zip(advantages[-1], v, strict=False)])
    if config.ppo.whiten_advantages:
        advantages = whitened(advantages)
    return Start(old, values, advantages, returns, kls)


def loss_of(oracle: Oracle, begin: Start, rows: list[int]) -> Tensor:
    ppo, total = oracle.config.ppo, torch.zeros((), dtype=torch.float64)
    tokens_in_all = sum(len(RESPONSES[row]) for row in rows)
    for row in rows:
        tokens = RESPONSES[row]
        w = {
            "token-mean": 1 / tokens_in_all,
            "seq-mean-token-mean": 1 / (len(rows) * len(tokens)),
            "seq-mean-token-sum": 1 / len(rows),
        }[ppo.loss_agg_mode]
        log_p, hidden = oracle.look(oracle.actor, row)
        values = oracle.values(row, hidden)
        entropy = -(log_p.exp() * log_p).sum(-1)
        total = total - ppo.entropy_coef * w * entropy.sum()
        total = total + w * policy_terms(ppo, picked(log_p, tokens), begin, row).sum()
        if ppo.kl_in_loss:
            with torch.no_grad():
                log_ref = oracle.look(oracle.ref, row)[0]
            total = total + ppo.kl_coef * w * kl_terms(oracle, log_p, log_ref, begin, row).sum()
        if values is not None:
            total = total + ppo.vf_coef * w * value_terms(ppo, values[:-1], begin, row).sum()
    return total


def policy_terms(ppo: Any, new: Tensor, begin: Start, row: int) -> Tensor:
    ratio = (new - begin.old[row]).exp()
    a = torch.tensor(begin.advantages[row], dtype=torch.float64)
    high = ppo.cliprange if ppo.cliprange_high is None else ppo.cliprange_high
    terms = torch.maximum(-a * ratio, -a * ratio.clamp(1 - ppo.cliprange, 1 + high))
    if ppo.dual_clip is not None:
        terms = torch.where(a < 0, torch.minimum(terms, -ppo.dual_clip * a), terms)
    return terms


def kl_terms(oracle: Oracle, log_p: Tensor, log_ref: Tensor, begin: Start, row: int) -> Tensor:
    tokens = RESPONSES[row]
    if oracle.config.ppo.kl_estimator == "exact":
        return oracle.kl(log_p, log_ref, tokens)
    new = picked(log_p, tokens)
    ratio = (new - begin.old[row]).exp().detach()
    delta = (new - picked(log_ref, tokens)).detach()
    return ratio * delta * new  # its derivative is the score-function gradient of the KL


def value_terms(ppo: Any, values: Tensor, begin: Start, row: int) -> Tensor:
    target = torch.tensor(begin.returns[row], dtype=torch.float64)
    errors = (values - target) ** 2
    if ppo.cliprange_value is not None:
        old = begin.values[row][:-1]
        clipped = old + (values - old).clamp(-ppo.cliprange_value, ppo.cliprange_value)
        errors = torch.maximum(errors, (clipped - target) ** 2)
    return errors / 2


class Adam:
    """AdamW by its formula."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        self.parameters, self.rate, self.count = parameters, rate, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    def norm(self) -> float:
        return math.sqrt(sum(float((p.grad**2).sum()) for p in self.parameters))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self.count += 1
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            g = p.grad * scale
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.95).add_(0.05 * g**2)
            unbiased = m / (1 - 0.9**self.count)
            size = (v / (1 - 0.95**self.count)).sqrt() + 1e-5
            p.mul_(1 - self.rate * 0.1).sub_(self.rate * unbiased / size)
            p.grad = None


def updates(oracle: Oracle, begin: Start, seed: int) -> None:
    optim, ppo = oracle.config.optim, oracle.config.ppo
    adams = [Adam(list(oracle.actor.parameters()), optim.actor_lr)]
    if oracle.head is not None:
        trunk = [] if oracle.critic is None else list(oracle.critic.parameters())
        trains = [p for p in trunk if p.shape != torch.Size([0])]
        adams.append(Adam([*trains, *oracle.head.parameters()], optim.critic_lr))
    order = torch.Generator().manual_seed(seed)
    for _ in range(ppo.ppo_epochs):
        for rows in torch.randperm(4, generator=order).tensor_split(ppo.num_minibatches):
            loss_of(oracle, begin, rows.tolist()).backward()
            norms = [adam.norm() for adam in adams]
            if optim.clip_jointly:
                norms = [math.sqrt(sum(n**2 for n in norms))] * len(adams)
            for adam, norm in zip(adams, norms, strict=True):
                adam.step(min(1.0, optim.max_grad_norm / (norm + 1e-6)))


def oracle_of(trainer: Trainer) -> Oracle:
    models = trainer.models
    critic = models.critic.trunk if models.critic else None
    doubles = [
        copy.deepcopy(part).double() if part is not None else None
        for part in (models.actor.model, models.ref.model, critic, models.value_head)
    ]
    return Oracle(trainer.config, *doubles)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_equals_the_calculation_by_hand(
    name: str, trainer: Callable[..., Trainer], folders: dict[str, str]
) -> None:
    ours = trainer(**SETTINGS[name])
    oracle = oracle_of(ours)
    begin = start(oracle)
    before = copy.deepcopy(oracle)
    prompts = encode_prompts(
        ours.models.tokenizer, read_prompts(folders["prompts"], "prompt"), 64, "error", "here"
    )
    metrics, _ = ppo_step(ours, prompts.take([0, 1], 2))
    updates(oracle, begin, ours.config.seed)
    assert metrics["objective/kl"] == pytest.approx(sum(begin.kl) / 4, abs=1e-4)
    shares = sum(shaped(ours.config)) / 4
    assert metrics["objective/shaped_scores"] == pytest.approx(shares, abs=1e-5)
    pairs = [
        (ours.models.actor.model, oracle.actor, before.actor),
        (ours.models.critic and ours.models.critic.trunk, oracle.critic, before.critic),
        (ours.models.value_head, oracle.head, before.head),
    ]
    for found, expected, old in pairs:
        if found is None:
            continue
        for a, b, c in zip(*(m.parameters() for m in (found, expected, old)), strict=True):
            torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=0)
            assert (b - c).abs().max() > 1e-4  # it moved further than the tolerance
