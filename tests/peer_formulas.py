"""What TRL, verl and OpenRLHF compute, in our own words, and how to reach what they ship.

Each formula takes the arguments of the peer's function of that name. `lift` takes the functions
out of an installed package: importing it would want flash-attn, Ray or DeepSpeed.
"""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


def mean_of(x, mask, axis=None):
    return (x * mask).sum(axis) / mask.sum(axis)


def aggregate(x, mask, mode):
    per_row = (x * mask).sum(1)
    if mode == "token-mean":
        return per_row.sum() / mask.sum()
    return (per_row / mask.sum(1) if mode == "seq-mean-token-mean" else per_row).mean()


def log_softmax_of(logits, index):
    return logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]


def whitened(x, mask, shift_mean=True):
    mean = mean_of(x, mask)
    count = mask.sum()
    var = mean_of((x - mean) ** 2, mask) * count / (count - 1)
    return (x - mean) / (var + 1e-8).sqrt() + (0 if shift_mean else mean)


def verl_gae(rewards, values, mask, gamma, lam):
    """Tokens that do not count are stepped over: value and advantage are carried past them."""
    ahead, after, found = 0.0, 0.0, []
    for r, v, m in zip(*(x.flip(1).T for x in (rewards, values, mask)), strict=True):
        here = r + gamma * after - v + gamma * lam * ahead
        ahead, after = torch.where(m > 0, here, ahead), torch.where(m > 0, v, after)
        found.insert(0, ahead)
    advantages = torch.stack(found, 1)
    return whitened(advantages, mask), advantages + values


def openrlhf_gae(self, values, rewards, mask, gamma, lambd):
    """Tokens that do not count are states of value 0."""
    values, rewards, found = values * mask, rewards * mask, []
    ahead, after = 0.0, 0.0
    for r, v in zip(rewards.flip(1).T, values.flip(1).T, strict=True):
        ahead, after = r + gamma * after - v + gamma * lambd * ahead, v
        found.insert(0, ahead)
    return torch.stack(found, 1), torch.stack(found, 1) + values


def surrogate(new, old, advantages, low, high, c):
    ratio = (new - old).clamp(-20, 20).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    if c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)
    return loss, (clipped > plain).float()


def verl_policy(old, new, advantages, mask, cliprange, clip_ratio_c=3.0, loss_agg_mode=MODES[0]):
    loss, bound = surrogate(new, old, advantages, cliprange, cliprange, clip_ratio_c)
    return (
        aggregate(loss, mask, loss_agg_mode),
        mean_of(bound, mask),
        mean_of(old - new, mask),
        None,
    )


def verl_value(vpreds, returns, values, mask, cliprange_value, loss_agg_mode=MODES[0]):
    near = values + (vpreds - values).clamp(-cliprange_value, cliprange_value)
    one, two = (vpreds - returns) ** 2, (near - returns) ** 2
    loss = aggregate(torch.maximum(one, two), mask, loss_agg_mode) / 2
    return loss, mean_of((two > one).float(), mask)


def verl_kl(new, ref, name):
    d = new - ref
    k3 = ((-d).clamp(-20, 20).exp() - 1 + d.clamp(-20, 20)).clamp(-10, 10)
    return {"kl": d, "abs": d.abs(), "mse": d * d / 2, "low_var_kl": k3}[name]


class OpenRLHFPolicy(nn.Module):
    def __init__(self, clip_eps_low, clip_eps_high, dual_clip=None, token_level_loss=True):
        super().__init__()
        self.clip, self.mode = (clip_eps_low, clip_eps_high, dual_clip), MODES[not token_level_loss]

    def forward(self, new, old, advantages, action_mask):
        loss, bound = surrogate(new, old, advantages, *self.clip)
        return aggregate(loss, action_mask, self.mode), mean_of(bound, action_mask)


class OpenRLHFValue(nn.Module):
    def __init__(self, clip_eps, token_level_loss=True):
        super().__init__()
        self.clip, self.mode = clip_eps, MODES[not token_level_loss]

    def forward(self, values, old, returns, action_mask):
        return verl_value(values, returns, old, action_mask, self.clip, self.mode)[0]


def openrlhf_kl(new, ref, kl_estimator):
    d = new - ref
    return {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[kl_estimator].clamp(-10, 10)


def openrlhf_reward(r, kl_coef, kl, action_mask):
    last = action_mask.cumsum(1).argmax(1)
    return -kl_coef * kl + functional.one_hot(last, kl.shape[1]) * r[:, None]


ORACLES = {
    "trl": {"selective_log_softmax": log_softmax_of, "masked_whiten": whitened},
    "verl": {
        "logprobs_from_logits_v2": log_softmax_of,
        "compute_gae_advantage_return": verl_gae,
        "compute_policy_loss": verl_policy,
        "compute_value_loss": verl_value,
        "kl_penalty_forward": verl_kl,
    },
    "openrlhf": {
        "masked_mean": mean_of,
        "get_advantages_and_returns": openrlhf_gae,
        "PolicyLoss": OpenRLHFPolicy,
        "ValueLoss": OpenRLHFValue,
        "compute_approx_kl": openrlhf_kl,
        "compute_reward": openrlhf_reward,
    },
}
FILES = {
    "trl": ("trainer/utils.py", "experimental/ppo/ppo_trainer.py"),
    "verl": ("utils/torch_functional.py", "trainer/ppo/core_algos.py"),
    "openrlhf": ("models/utils.py", "models/loss.py", "trainer/ppo_utils/experience_maker.py"),
}


def lift(package):
    """Take the functions of a package out of its files, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    wanted = {*ORACLES[package], "aggregate_loss", "agg_loss", "masked_var", "masked_sum",
              "masked_mean", "masked_whiten", "clip_by_value"}  # fmt: skip
    names = {"torch": torch, "nn": nn, "F": functional, "Tensor": Tensor}
    found = {}
    for file in FILES[package]:
        path = Path(spec.submodule_search_locations[0]) / file
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
                node.decorator_list = []
                future = "from __future__ import annotations\n"
                code = compile(future + ast.unparse(node), str(path), "exec")
                exec(code, names)
                found[node.name] = names[node.name]
        names["verl_F"] = SimpleNamespace(**found)
    return SimpleNamespace(**found)


def trl_step(b, mask, scores, cfg):
    """The arithmetic of `trl.experimental.ppo.PPOTrainer.train` from log-probs to loss."""
    rows, last = torch.arange(len(mask)), mask.sum(1) - 1
    beyond = torch.where(last + 1 < mask.shape[1], last + 1, last)
    with_next = torch.arange(mask.shape[1]) <= last[:, None] + 1
    new, old, ref = (x.masked_fill(~mask, 1.0) for x in (b.new, b.old, b.ref))
    rewards = -cfg.kl_coef * (old - ref)
    rewards[rows, beyond] += scores
    values = b.old_values.masked_fill(~with_next, 0)
    advantages, returns = openrlhf_gae(
        None, values, rewards, torch.ones_like(rewards), cfg.gamma, cfg.lam
    )
    advantages = whitened(advantages, mask).masked_fill(~mask, 0)
    near = torch.clamp(b.values, values - cfg.cliprange_value, values + cfg.cliprange_value)
    worst = torch.maximum((b.values - returns) ** 2, (near - returns) ** 2)
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - cfg.cliprange, 1 + cfg.cliprange)
    policy = mean_of(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
    loss = policy + cfg.vf_coef * mean_of(worst, with_next) / 2
    return SimpleNamespace(loss=loss, advantages=advantages, ratio=ratio.mean())


TRL = SimpleNamespace(
    kl_coef=0.05, gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1
)
