"""Our operators in place of TRL's, verl's and OpenRLHF's: same tensors in, same numbers out.

Every test runs against their formulas in our own words and, marked slow, against the functions of
the packages themselves where those are installed (trl 1.9.0, verl 0.9.1, openrlhf 0.11.2).
"""

from types import SimpleNamespace

import pytest
import torch

from ppo_kernels import (
    gae,
    kl_penalty,
    policy_loss,
    token_logprobs,
    token_rewards,
    token_weights,
    value_loss,
    whiten,
)
from tests.peer_formulas import MODES, ORACLES, TRL, lift, log_softmax_of, openrlhf_gae, trl_step


@pytest.fixture(params=["oracle", pytest.param("installed", marks=pytest.mark.slow)])
def peer(request):
    """The functions of a package, by its name."""

    def get(package):
        if request.param == "oracle":
            return SimpleNamespace(**ORACLES[package])
        return lift(package)

    return get


@pytest.fixture
def batch():
    """A rollout of four responses with a hole in the second, all in float64."""
    new, old, ref, values, old_values, returns, rewards, advantages = torch.randn(
        8, 4, 9, dtype=torch.float64
    ).unbind()
    lengths = torch.tensor([9, 8, 3, 5])
    ends = torch.arange(9) < lengths[:, None]
    mask = ends.clone()
    mask[1, 2:5] = False
    return SimpleNamespace(
        new=new.requires_grad_(), old=new.detach() + 0.4 * old, ref=ref, values=values,
        old_values=values + 0.3 * old_values, returns=returns, rewards=rewards,
        advantages=advantages, ends=ends, mask=mask, scores=rewards[:, 0],
    )  # fmt: skip


def close(found, expected, rtol=1e-6):
    """Equal to rounding; verl divides by count + 1e-8, and our weights are float32."""
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


def same_gradient(ours, theirs, of):
    close(*(torch.autograd.grad(loss, of)[0] for loss in (ours, theirs)))


@pytest.mark.parametrize(
    ("package", "name"), [("trl", "selective_log_softmax"), ("verl", "logprobs_from_logits_v2")]
)
def test_logprobs(peer, package, name):
    logits = torch.randn(3, 5, 41, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(41, (3, 5))
    theirs = getattr(peer(package), name)(logits, tokens)
    ours = token_logprobs(logits, tokens)
    close(ours, theirs)
    weights = torch.randn(3, 5, dtype=torch.float64)
    same_gradient((ours * weights).sum(), (theirs * weights).sum(), logits)
    # bfloat16: theirs are rounded to 8 bits of mantissa, ours are float32
    small = (4 * logits.detach()).bfloat16()
    exact = log_softmax_of(small.double(), tokens)
    errors = [
        (each.double() - exact).abs().max()
        for each in (token_logprobs(small, tokens), getattr(peer(package), name)(small, tokens))
    ]
    assert errors[0] < 1e-5 < 1e-3 < errors[1]


def test_verl_gae(peer, batch):
    b, mask = batch, batch.mask
    advantages, returns = peer("verl").compute_gae_advantage_return(
        b.rewards, b.values, mask.double(), gamma=0.97, lam=0.9
    )
    ours, our_returns = gae(b.rewards, b.values, mask, gamma=0.97, gae_lambda=0.9)
    close(whiten(ours, mask)[mask], advantages[mask])
    close(our_returns[mask], returns[mask])


@pytest.mark.parametrize("mode", MODES)
def test_verl_losses(peer, batch, mode):
    b, mask = batch, batch.mask
    verl = peer("verl")
    loss, clipfrac, kl, _ = verl.compute_policy_loss(
        b.old, b.new, 4 * b.advantages, mask.double(), cliprange=0.2, loss_agg_mode=mode
    )
    weights = token_weights(mask, mode)
    ours = policy_loss(b.new, b.old, 4 * b.advantages, weights, cliprange=0.2, dual_clip=3.0)
    close(ours.loss, loss)
    close(ours.clipfrac, clipfrac)
    same_gradient(ours.loss, loss, b.new)
    close((token_weights(mask) * (b.old - b.new)).sum(), kl)  # signed; ours is ρ − 1 − log ρ ≥ 0
    assert ours.approx_kl >= 0
    values = b.values.clone().requires_grad_()
    loss, clipfrac = verl.compute_value_loss(
        values, b.returns, b.old_values, mask.double(), 0.2, loss_agg_mode=mode
    )
    found = value_loss(values, b.old_values, b.returns, weights, cliprange_value=0.2)
    close(found.loss, loss)
    close(found.clipfrac, clipfrac)
    same_gradient(found.loss, loss, values)


@pytest.mark.parametrize(
    ("name", "estimator"), [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3")]
)
def test_verl_kl(peer, batch, name, estimator):
    near = batch.new.detach() + 0.5 * batch.ref
    theirs = peer("verl").kl_penalty_forward(batch.new, near, name)
    close(kl_penalty(batch.new, near, estimator=estimator), theirs)


def test_openrlhf_means_and_rewards(peer, batch):
    b, mask, openrlhf = batch, batch.mask, peer("openrlhf")
    ours = (token_weights(mask) * b.rewards).sum()
    close(ours, openrlhf.masked_mean(b.rewards, mask.double(), None))
    kl = openrlhf.compute_approx_kl(b.new, b.ref, kl_estimator="k1")
    theirs = openrlhf.compute_reward(b.scores, 0.1, kl, action_mask=mask.long())
    found = token_rewards(b.scores, b.new, b.ref, mask, kl_coef=0.1)
    close(found[mask], theirs[mask].double())


@pytest.mark.parametrize(("token_level", "mode"), [(True, MODES[0]), (False, MODES[1])])
def test_openrlhf_losses(peer, batch, token_level, mode):
    b, mask, openrlhf = batch, batch.mask, peer("openrlhf")
    policy = openrlhf.PolicyLoss(
        clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0, token_level_loss=token_level
    )
    loss, clipfrac, *_ = policy(b.new, b.old, 4 * b.advantages, action_mask=mask.double())
    weights, clip = token_weights(mask, mode), {"cliprange": 0.2, "cliprange_high": 0.28}
    ours = policy_loss(b.new, b.old, 4 * b.advantages, weights, dual_clip=3.0, **clip)
    close(ours.loss, loss)
    close(ours.clipfrac, clipfrac)
    same_gradient(ours.loss, loss, b.new)
    value = openrlhf.ValueLoss(clip_eps=0.5, token_level_loss=token_level)
    theirs = value(b.values, b.old_values, b.returns, action_mask=mask.double())
    close(value_loss(b.values, b.old_values, b.returns, weights, cliprange_value=0.5).loss, theirs)


def test_openrlhf_gae_without_holes(peer, batch):
    b, mask = batch, batch.ends
    theirs = peer("openrlhf").get_advantages_and_returns(
        None, b.values, b.rewards, mask.double(), 0.97, 0.9
    )
    ours = gae(b.rewards, b.values, mask, gamma=0.97, gae_lambda=0.9)
    for found, expected in zip(ours, theirs, strict=True):
        close(found[mask], expected[mask])


def our_step(b, mask, scores, cfg):
    rewards = token_rewards(scores, b.old, b.ref, mask, kl_coef=cfg.kl_coef)
    advantages, returns = gae(rewards, b.old_values, mask, gamma=cfg.gamma, gae_lambda=cfg.lam)
    advantages = whiten(advantages, mask)
    policy = policy_loss(b.new, b.old, advantages, mask, cliprange=cfg.cliprange)
    value = value_loss(b.values, b.old_values, returns, mask, cliprange_value=cfg.cliprange_value)
    loss = policy.loss + cfg.vf_coef * value.loss
    return SimpleNamespace(loss=loss, advantages=advantages, ratio=policy.ratio_mean)


def test_the_loop_of_trl_on_responses_of_full_length(batch):
    mask = torch.ones_like(batch.mask)
    theirs, ours = (step(batch, mask, batch.scores, TRL) for step in (trl_step, our_step))
    close(ours.advantages, theirs.advantages)
    close(ours.loss, theirs.loss)
    close(ours.ratio, theirs.ratio)
    same_gradient(ours.loss, theirs.loss, batch.new)


# Where the numbers differ, and why: docs/drop_in.md has the list.


def test_trl_puts_the_score_after_the_end_of_short_responses(batch):
    """With λ < 1 a short response then hears less of its score than one of full length."""
    b = SimpleNamespace(**vars(batch))
    b.ref, b.old_values = b.old, torch.zeros_like(b.old)
    mask = b.ends
    scores = torch.ones(4, dtype=torch.float64)
    rewards = torch.zeros_like(b.old)
    rewards[torch.arange(4), [8, 8, 3, 5]] = 1.0  # rows of 9, 8, 3 and 5 tokens
    theirs = openrlhf_gae(None, b.old_values, rewards, torch.ones_like(rewards), 1.0, 0.95)[0]
    ours, _ = gae(token_rewards(scores, b.old, b.ref, mask, kl_coef=0.05), b.old_values, mask)
    last = torch.tensor([8, 7, 2, 4])[:, None]
    close(theirs.gather(1, last)[:, 0], torch.tensor([1.0, 0.95, 0.95, 0.95]).double())
    close(ours.gather(1, last)[:, 0], torch.ones(4).double())
    # and this is what the loop does
    close(trl_step(b, mask, scores, TRL).advantages, torch.where(mask, whiten(theirs, mask), 0))


def test_trl_s_ratio_is_diluted_by_padding(batch):
    theirs = trl_step(batch, batch.ends, batch.scores, TRL)
    ours = our_step(batch, batch.ends, batch.scores, TRL)
    share = batch.ends.double().mean()
    close(theirs.ratio, share * ours.ratio + (1 - share))


def test_means_of_micro_batches_are_not_the_mean_of_the_batch(peer, batch):
    b, mask, verl = batch, batch.ends, peer("verl")

    def their_loss(rows):
        parts = (x[rows] for x in (b.old, b.new, b.advantages, mask.double()))
        return verl.compute_policy_loss(*parts, cliprange=0.2)[0]

    whole = their_loss(slice(None))
    mean = torch.stack([their_loss(slice(row, row + 1)) for row in range(4)]).mean()
    assert abs(mean - whole) > 0.01
    weights = token_weights(mask)
    ours = [
        policy_loss(b.new[[row]], b.old[[row]], b.advantages[[row]], weights[[row]], dual_clip=3.0)
        for row in range(4)
    ]
    close(torch.stack([each.loss for each in ours]).sum(), whole)


def test_openrlhf_takes_holes_for_states_of_value_zero(peer, batch):
    b, mask = batch, batch.mask
    get = peer("openrlhf").get_advantages_and_returns
    ours, _ = gae(b.rewards, b.values, mask, gamma=1.0, gae_lambda=0.95)
    theirs, _ = get(None, b.values, b.rewards, mask.double(), 1.0, 0.95)
    wrong = (ours - theirs).abs() > 1e-6
    assert wrong[1, :2].all()  # before the hole of row 1
    assert not wrong[mask & ~wrong.new_tensor([[0], [1], [0], [0]], dtype=torch.bool)].any()
    ours, _ = gae(b.rewards, b.values, mask, gamma=1.0, gae_lambda=1.0)
    close(ours[mask], get(None, b.values, b.rewards, mask.double(), 1.0, 1.0)[0][mask])


@pytest.mark.parametrize("distance", [12.0, 30.0])
def test_clamped_penalties_lose_their_gradient(peer, distance):
    new = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([distance], dtype=torch.float64)
    for theirs in (
        peer("verl").kl_penalty_forward(new, ref, "low_var_kl"),
        peer("openrlhf").compute_approx_kl(new, ref, kl_estimator="k3"),
    ):
        assert theirs.item() == 10.0
        assert torch.autograd.grad(theirs.sum(), new)[0].item() == 0.0
    ours = kl_penalty(new, ref, estimator="k3")
    assert ours.item() == pytest.approx(torch.expm1(ref).item() - distance)
    assert torch.autograd.grad(ours.sum(), new)[0].item() == pytest.approx(-torch.expm1(ref).item())


def test_a_ratio_beyond_exp_20_keeps_its_gradient(peer):
    new = torch.tensor([[21.0]], dtype=torch.float64, requires_grad=True)
    old, one, mask = torch.zeros(1, 1).double(), torch.ones(1, 1).double(), torch.ones(1, 1)
    theirs = peer("verl").compute_policy_loss(
        old, new, -one, mask, cliprange=0.2, clip_ratio_c=1e12
    )[0]
    assert torch.autograd.grad(theirs, new)[0].item() == 0.0
    ours = policy_loss(new, old, -one, mask.bool()).loss
    assert torch.autograd.grad(ours, new)[0].item() == pytest.approx(
        float(torch.tensor(21.0).exp())
    )


def test_garbage_under_the_mask_stays_there(peer, batch):
    b, mask = batch, batch.ends
    dirty = b.advantages.masked_fill(~mask, float("nan"))
    assert peer("trl").masked_whiten(dirty, mask).isnan().all()
    close(whiten(dirty, mask), whiten(b.advantages, mask))
    values = b.values.masked_fill(~mask, float("nan"))
    theirs = peer("openrlhf").get_advantages_and_returns(
        None, values, b.rewards, mask.double(), 1.0, 0.95
    )[0]
    assert theirs[1:].isnan().any(1).all()
    close(gae(b.rewards, values, mask)[0], gae(b.rewards, b.values, mask)[0])


def test_one_token_has_a_whitened_value(peer):
    x, mask = torch.tensor([[2.0, 5.0]]), torch.tensor([[True, False]])
    assert not peer("trl").masked_whiten(x, mask.float()).isfinite().all()
    assert whiten(x, mask).tolist() == [[0.0, 0.0]]
