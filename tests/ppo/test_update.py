"""The update: ratio 1 at the start, and steps equal to a calculation written from the papers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo.batch import Minibatch
from ppo.config import OptimConfig, PPOConfig
from ppo.critic import Critic
from ppo.forward import response_logprobs
from ppo.learner import make_learner
from ppo.objective import Objective, kl_term
from ppo.policy import Policy
from ppo.update import BadNumbers, UpdateStats, update


def make_critic(actor: PreTrainedModel) -> Critic:
    torch.manual_seed(3)
    return Critic(copy.deepcopy(actor.base_model), nn.Linear(32, 1))


def make_batch(actor: PreTrainedModel, rows: int = 6, prompt: int = 4, width: int = 5) -> Minibatch:
    """Random tokens, ragged on both sides, with the actor's own log-probs as the old ones."""
    g = torch.Generator().manual_seed(7)
    starts = torch.randint(0, prompt, (rows, 1), generator=g)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    prompt_mask, response_mask = torch.arange(prompt) >= starts, torch.arange(width) < lengths
    tokens = torch.randint(3, 64, (rows, prompt + width), generator=g)
    figures = torch.randn(3, rows, width, generator=g) * response_mask
    batch = Minibatch(
        prompts=tokens[:, :prompt] * prompt_mask,
        prompt_mask=prompt_mask,
        responses=tokens[:, prompt:] * response_mask,
        response_mask=response_mask,
        old_logprobs=figures[0],
        ref_logprobs=figures[0],
        old_values=figures[0],
        advantages=figures[1],
        returns=figures[2],
    )
    with torch.no_grad():
        logprobs = response_logprobs(Policy(actor), batch, temperature=1.0, impl="torch")
    return replace(batch, old_logprobs=logprobs, ref_logprobs=logprobs)


def run(
    actor: PreTrainedModel,
    critic: Critic,
    batch: Minibatch,
    ppo: PPOConfig,
    *,
    by_logits: bool = False,
    packed: bool = False,
    skip_bad_steps: bool = False,
) -> list[UpdateStats]:
    optim = OptimConfig(actor_lr=1e-2, critic_lr=1e-2, max_grad_norm=0.5)
    policy = Policy(actor)
    if by_logits:
        policy.head = None
    if packed:
        assert policy.pack() is critic.pack() is None
    learners = [
        make_learner(model, list(model.parameters()), 1e-2, optim, 100)
        for model in (policy, critic)
    ]
    how = {"temperature": 1.0, "accelerator": Accelerator(), "impl": "torch"}
    generator = torch.Generator().manual_seed(0)
    how |= {"skip_bad_steps": skip_bad_steps, "packed": packed}
    return list(update(*learners, batch, ppo, optim, generator=generator, **how))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_first_ratio_is_one(name: str, request: pytest.FixtureRequest) -> None:
    actor = request.getfixturevalue(name)
    batch = make_batch(actor)
    minibatch = next(batch.shuffled(2, torch.Generator().manual_seed(0)))
    logprobs = response_logprobs(Policy(actor), minibatch, temperature=1.0, impl="torch")
    assert ((logprobs - minibatch.old_logprobs).exp() - 1).abs().max() < 1e-5
    first = run(actor, make_critic(actor), batch, PPOConfig())[0]
    assert abs(float(first.policy.ratio_mean) - 1) < 1e-5
    assert float(first.policy.clipfrac) == 0.0


def expected_losses(actor: nn.Module, critic: Critic, batch: Minibatch) -> tuple[Tensor, Tensor]:
    """Token means of the clipped losses, row by row and token by token, from Schulman et al."""
    policy, value, count = torch.zeros(()), torch.zeros(()), 0
    for b in range(len(batch)):
        prompt = batch.prompts[b][batch.prompt_mask[b]]
        response = batch.responses[b][batch.response_mask[b]]
        ids = torch.cat([prompt, response])[None]
        log_p = actor(input_ids=ids).logits[0].log_softmax(-1)
        values = critic.head(critic.trunk(input_ids=ids).last_hidden_state)[0, :, 0]
        for t, token in enumerate(response):
            at = len(prompt) - 1 + t
            ratio = (log_p[at, token] - batch.old_logprobs[b, t]).exp()
            advantage, target = batch.advantages[b, t], batch.returns[b, t]
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            old = batch.old_values[b, t]
            clipped = old + (values[at] - old).clamp(-0.2, 0.2)
            errors = torch.stack([(values[at] - target) ** 2, (clipped - target) ** 2])
            value = value + 0.5 * errors.max()
            count += 1
    return policy / count, value / count


@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
def test_two_steps_equal_a_calculation_by_hand(
    llama: PreTrainedModel, micro_batch_size: int | None
) -> None:
    actor, critic, batch = llama, make_critic(llama), make_batch(llama)
    by_hand = [copy.deepcopy(actor), copy.deepcopy(critic)]
    adams = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        for m in by_hand
    ]
    settings = PPOConfig(ppo_epochs=2, num_minibatches=1, vf_coef=0.5)
    stats = run(actor, critic, batch, replace(settings, micro_batch_size=micro_batch_size))
    for step in range(2):
        policy, value = expected_losses(*by_hand, batch)
        (policy + 0.5 * value).backward()
        for model, adam in zip(by_hand, adams, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            adam.step()
            adam.zero_grad()
        assert float(stats[step].policy.loss) == pytest.approx(policy.item(), abs=1e-5)
        assert float(stats[step].value.loss) == pytest.approx(value.item(), abs=1e-5)
    for found, expected in zip((actor, critic), by_hand, strict=True):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_micro_batches_change_nothing(
    llama: PreTrainedModel, mode: str, entropy_coef: float
) -> None:
    batch, figures = make_batch(llama), []
    batch = replace(batch, old_logprobs=batch.old_logprobs + 0.3)  # so that clipping binds
    for size in (None, 1, 4):
        actor, critic = copy.deepcopy(llama), make_critic(llama)
        ppo = PPOConfig(
            ppo_epochs=1, loss_agg_mode=mode, entropy_coef=entropy_coef, micro_batch_size=size
        )
        last = run(actor, critic, batch, ppo)[-1]
        policy, value = last.policy, last.value
        figures.append(torch.stack([*policy, *value, last.actor_grad_norm, last.critic_grad_norm]))
    torch.testing.assert_close(figures[0], figures[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(figures[0], figures[2], atol=1e-5, rtol=1e-5)


def test_every_row_is_in_one_minibatch_of_each_epoch(llama: PreTrainedModel) -> None:
    batch = make_batch(llama)
    parts = list(batch.shuffled(3, torch.Generator().manual_seed(1)))
    assert [len(part) for part in parts] == [2, 2, 2]
    seen = torch.cat([part.returns[:, 0] for part in parts]).sort().values
    assert torch.equal(seen, batch.returns[:, 0].sort().values)


def test_the_number_of_steps_is_epochs_times_minibatches(llama: PreTrainedModel) -> None:
    ppo = PPOConfig(ppo_epochs=3, num_minibatches=2)
    assert len(run(llama, make_critic(llama), make_batch(llama), ppo)) == 6


def test_gradients_are_clipped(llama: PreTrainedModel) -> None:
    batch = make_batch(llama)
    before = [parameter.clone() for parameter in llama.parameters()]
    huge = replace(batch, advantages=batch.advantages * 1e4)
    stats = run(llama, make_critic(llama), huge, PPOConfig(ppo_epochs=1, num_minibatches=1))
    assert float(stats[0].actor_grad_norm) > 100
    moved = max((a - b).abs().max().item() for a, b in zip(llama.parameters(), before, strict=True))
    assert 0 < moved <= 1.01e-2  # one Adam step of lr 1e-2


def test_updates_stop_before_the_step_whose_kl_is_past_the_target(llama: PreTrainedModel) -> None:
    batch = make_batch(llama)
    plain = PPOConfig(ppo_epochs=4, num_minibatches=2)
    free = run(copy.deepcopy(llama), make_critic(llama), batch, plain)
    kls = [stats.policy.approx_kl.item() for stats in free]
    first_past = next(i for i, kl in enumerate(kls) if kl > 1e-3)
    assert 0 < first_past < 8
    actor = copy.deepcopy(llama)
    stats = run(actor, make_critic(llama), batch, replace(plain, target_kl=1e-3))
    assert [s.policy.approx_kl.item() for s in stats] == kls[:first_past]
    assert all(parameter.grad is None for parameter in actor.parameters())


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_models_that_keep_their_logits_take_the_same_steps(
    llama: PreTrainedModel, dual_clip: float | None
) -> None:
    batch = make_batch(llama)
    batch = replace(batch, old_logprobs=batch.old_logprobs - 0.5)  # so that clipping binds
    ppo = PPOConfig(entropy_coef=0.1, dual_clip=dual_clip, cliprange_high=0.3)
    actors = [copy.deepcopy(llama) for _ in range(2)]
    both = [
        run(actor, make_critic(llama), batch, ppo, by_logits=by_logits)
        for actor, by_logits in zip(actors, (False, True), strict=True)
    ]
    for lean, full in zip(*both, strict=True):
        torch.testing.assert_close(lean.policy, full.policy, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lean.actor_grad_norm, full.actor_grad_norm, atol=0, rtol=1e-4)
    for a, b in zip(actors[0].parameters(), actors[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=0)


def test_a_gradient_that_is_not_finite_is_never_stepped_on(llama: PreTrainedModel) -> None:
    batch = make_batch(llama)
    batch = replace(batch, returns=batch.returns.masked_fill(batch.response_mask, float("inf")))
    critic = make_critic(llama)
    before = [p.clone() for p in (*llama.parameters(), *critic.parameters())]
    with pytest.raises(BadNumbers, match=r"^the value loss is not finite; the step was not taken$"):
        run(llama, critic, batch, PPOConfig())
    stats = run(llama, critic, batch, PPOConfig(), skip_bad_steps=True)
    assert [each.actor_grad_norm for each in stats] == [None] * 4
    after = (*llama.parameters(), *critic.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_kl_term_stays_finite_far_from_the_old_policy() -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    ones = torch.ones(1, 1)
    objective = Objective(
        -100 * ones, ones, 0.01 * ones, 0.2, None, None, 0.0, ref_logprobs=-4 * ones, kl_coef=1.0
    )
    value = kl_term(logprobs, objective)
    value.backward()
    assert value.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.01 * math.exp(40) * 3, rel=1e-5)


def test_the_kl_terms_expected_gradient_is_that_of_the_kl() -> None:
    """All tokens of a small vocabulary, each as often as the old policy samples it."""
    g = torch.Generator().manual_seed(0)
    new, old, ref = (3 * torch.randn(3, 8, generator=g, dtype=torch.float64)).unbind()
    new.requires_grad_()
    log_p = new.log_softmax(-1)
    objective = Objective(
        old.log_softmax(-1)[None],
        torch.zeros(1, 8),
        old.softmax(-1)[None],
        0.2,
        None,
        None,
        0.0,
        ref_logprobs=ref.log_softmax(-1)[None],
        kl_coef=1.0,
    )
    value = kl_term(log_p[None], objective)
    (found,) = torch.autograd.grad(value, new, retain_graph=True)
    exact = (log_p.exp() * (log_p - ref.log_softmax(-1))).sum()
    (expected,) = torch.autograd.grad(exact, new)
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(found, expected)
