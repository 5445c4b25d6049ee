"""The policy loss from hidden states is the composition of its parts."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import policy_loss, reference, token_weights
from ppo_kernels.linear_ppo_loss import linear_ppo_loss
from ppo_kernels.linear_token_logprobs import linear_token_logprobs_and_entropy
from ppo_kernels.testing import assert_within_error_budget

N, D, V = 12, 6, 41


def sample(dtype=torch.float32, n=N):
    """hidden, weight, bias; tokens, old_logprobs, advantages.

    Ratios from e to 1/e: Â < 0 at 2.7 (dual clip), Â > 0 at 1.095 (within ε_high, not within ε).
    """
    x = (torch.randn(n, D), torch.randn(V, D), torch.randn(V))
    hidden, weight, bias = (t.to(dtype) for t in x)
    tokens = torch.randint(V, (n,))
    logprobs, _ = reference.linear_token_logprobs_and_entropy(hidden, weight, tokens, bias=bias)
    old = (logprobs + torch.linspace(-1, 1, n)).float()
    sign = torch.where(torch.arange(n) % 5 == 0, -1.0, 1.0)
    sign[5:6] = 1
    return (hidden, weight, bias), (tokens, old, (torch.rand(n) + 0.5) * sign)


def flat(result):
    return [result.loss, *result.policy, result.entropy]


def gradients(loss, leaves):
    return [x.clone() for x in torch.autograd.grad(loss, leaves, retain_graph=True)]


def run(operator, inputs, constants, weights, **options):
    """All numbers of the result, and the gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    tokens, old, advantages = constants
    result = operator(
        leaves[0], leaves[1], tokens, old, advantages, weights, bias=leaves[2], **options
    )
    return flat(result) + gradients(result.loss, leaves)


def composition(hidden, weight, tokens, old, advantages, weights, *, bias, entropy_coef, **options):
    clip = {k: options.pop(k) for k in ("cliprange", "dual_clip", "cliprange_high") if k in options}
    mask = weights != 0
    logprobs, entropy = linear_token_logprobs_and_entropy(
        hidden, weight, tokens, bias=bias, response_mask=mask, **options
    )
    policy = policy_loss(logprobs, old, advantages, weights, **clip)
    w = weights / mask.sum() if weights.dtype == torch.bool else weights
    loss = policy.loss - entropy_coef * (w * entropy).sum()
    mean = (entropy * mask).sum() / mask.sum()
    top = (logprobs - old)[mask].exp().amax()
    return reference.LinearPPOLoss(loss, policy._replace(loss=policy.loss.detach()), mean, top)


MASK = torch.arange(N) % 4 != 2
WEIGHTS = {
    "mask": MASK,
    "token-mean": token_weights(MASK.view(3, 4), "token-mean", num_tokens=100).flatten(),
    "seq-mean": token_weights(MASK.view(3, 4), "seq-mean-token-mean").flatten(),
    "signed": torch.linspace(-1, 1, N) * MASK,
}


@pytest.mark.parametrize("chunk_bytes", [1, 5 * V * 4, None])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_is_the_composition_of_its_parts(weights, chunk_bytes, impl):
    inputs, constants = sample()
    options = {"entropy_coef": 0.1, "temperature": 0.8, "dual_clip": 1.5, "cliprange_high": 0.3}
    options["cliprange"] = 0.05
    got = run(linear_ppo_loss, inputs, constants, weights, **options, chunk_bytes=chunk_bytes,
              impl=impl)  # fmt: skip
    want = run(composition, inputs, constants, weights, **options, impl=impl)
    assert_close(got, want, rtol=1e-5, atol=3e-6)
    assert 0 < got[2] < 1  # some tokens are clipped, and some are not


@pytest.mark.parametrize("head", [{}, {"logit_softcap": 2.0, "logit_scale": 3.0}])
def test_as_exact_as_the_specification_in_float32(head, impl):
    inputs, constants = sample()
    weights, options = WEIGHTS["seq-mean"], {"entropy_coef": 0.1, **head}
    wide = [x.double() for x in inputs], (constants[0], *(x.double() for x in constants[1:]))
    oracle = run(reference.linear_ppo_loss, *wide, weights.double(), **options)
    baseline = run(reference.linear_ppo_loss, inputs, constants, weights, **options)
    results = run(
        linear_ppo_loss, inputs, constants, weights, chunk_bytes=700, impl=impl, **options
    )
    for got, want, own in zip(results, oracle, baseline, strict=True):
        # The loss is a sum of terms around 1 that cancel; its baseline may be exact by luck.
        # Factor 3: a dozen rows are few to find the baseline's largest error in.
        tiny = None if got.dim() else 5e-7
        assert_within_error_budget(got, want, own, tiny=tiny, factor=3.0)


def test_first_update_on_paper(impl):
    # Two tokens, uniform over 4 columns, ratio 1, Â = (1, −3): loss −mean Â − 0.5·ln 4 = 1 − ln 2;
    # d loss/dz = −½Â·(1{a} − ¼), so the bias gets the sum over both tokens.
    hidden, weight, bias = torch.ones(2, 1), torch.zeros(4, 1), torch.zeros(4, requires_grad=True)
    old, advantages = torch.full((2,), -math.log(4)), torch.tensor([1.0, -3.0])
    result = linear_ppo_loss(
        hidden, weight, torch.tensor([0, 2]), old, advantages, torch.ones(2).bool(), bias=bias,
        entropy_coef=0.5, impl=impl,
    )  # fmt: skip
    assert_close(result.loss.item(), 1 - math.log(2))
    assert_close(result.policy.loss.item(), 1.0)
    assert_close(result.entropy.item(), math.log(4))
    (grad,) = torch.autograd.grad(result.loss, bias)
    assert_close(grad, torch.tensor([-0.5 - 0.25, -0.25, 1.5 - 0.25, -0.25]))


def test_backward_scales_and_can_be_repeated(impl):
    inputs, (tokens, old, advantages) = sample()
    leaves = [x.requires_grad_() for x in inputs]
    loss = linear_ppo_loss(
        leaves[0], leaves[1], tokens, old, advantages, MASK, bias=leaves[2], impl=impl
    ).loss
    once, twice = gradients(loss, leaves), gradients(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    for got, want in zip(gradients(3 * loss, leaves), once, strict=True):
        assert_close(got, 3 * want)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("as_float", [False, True])
def test_masked_positions_have_no_effect(rubbish, as_float, impl):
    inputs, (tokens, old, advantages) = sample()
    tokens[0] = -100
    counted = MASK & (tokens != -100)
    weights = MASK / 7.0 if as_float else MASK
    dirty = torch.where(counted[:, None], inputs[0], rubbish)
    constants = (tokens, *(torch.where(counted, x, rubbish) for x in (old, advantages)))
    options = {"entropy_coef": 0.1, "chunk_bytes": 700}
    got = run(linear_ppo_loss, (dirty, *inputs[1:]), constants, weights, **options, impl=impl)
    kept = tuple(x[counted] for x in (tokens, old, advantages))
    want = run(linear_ppo_loss, (inputs[0][counted], *inputs[1:]), kept, weights[counted],
               **options, impl="reference")  # fmt: skip
    assert (got[8][~counted] == 0).all()
    got[8] = got[8][counted]
    assert_close(got, want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("n", [0, N])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_nothing_counts(n, dtype, impl):
    inputs, constants = sample(n=n)
    inputs = (torch.full((n, D), math.nan), *inputs[1:])
    got = run(linear_ppo_loss, inputs, constants, torch.zeros(n, dtype=dtype), impl=impl)
    assert all((x == 0).all() for x in got)


def test_no_grad_gives_the_same_numbers(impl):
    inputs, constants = sample()
    want = run(linear_ppo_loss, inputs, constants, MASK, entropy_coef=0.1, impl=impl)
    with torch.no_grad():
        result = linear_ppo_loss(
            *inputs[:2], *constants, MASK, bias=inputs[2], entropy_coef=0.1, impl=impl
        )
    assert not result.loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(flat(result), want[:8], strict=True))


def test_only_the_loss_is_differentiable(impl):
    inputs, (tokens, old, advantages) = sample()
    advantages.requires_grad_()
    result = linear_ppo_loss(
        inputs[0].requires_grad_(), inputs[1], tokens, old, advantages, MASK, impl=impl
    )
    assert [x.requires_grad for x in flat(result)] == [True] + [False] * 7
    result.loss.backward()
    assert advantages.grad is None


def test_micro_batches_add_up(impl):
    """With weights over the whole minibatch, losses and gradients of its parts are sums."""
    inputs, constants = sample()
    weights = WEIGHTS["seq-mean"]
    whole = run(linear_ppo_loss, inputs, constants, weights, entropy_coef=0.1, impl=impl)
    halves = [
        run(linear_ppo_loss, (inputs[0][part], *inputs[1:]), [x[part] for x in constants],
            weights[part], entropy_coef=0.1, impl=impl)
        for part in (slice(0, 5), slice(5, N))
    ]  # fmt: skip
    for i in (0, 1, 9, 10):
        assert_close(halves[0][i] + halves[1][i], whole[i], rtol=1e-5, atol=3e-6)


def test_float16_gradients_survive_small_weights():
    """With w = 1e-6 a float16 gradient of a chunk would be 0."""
    inputs, constants = sample(torch.float16)
    small = run(linear_ppo_loss, inputs, constants, MASK * 1e-6, impl="torch")
    large = run(linear_ppo_loss, inputs, constants, MASK * 1e-3, impl="torch")
    leaves = [x.requires_grad_() for x in inputs]
    loss = linear_ppo_loss(*leaves[:2], *constants, MASK * 1e-6, bias=leaves[2]).loss
    scaled = gradients(loss * 1e3, leaves)  # what a gradient scaler does
    assert_close(scaled, large[8:], rtol=2e-3, atol=1e-6)
    assert small[0].item() == pytest.approx(large[0].item() / 1e3, rel=1e-5)


def test_batch_of_sequences(impl):
    inputs, constants = sample()
    shaped = (inputs[0].view(3, 4, D), *inputs[1:])
    got = run(linear_ppo_loss, shaped, [x.view(3, 4) for x in constants], MASK.view(3, 4),
              impl=impl)  # fmt: skip
    want = run(linear_ppo_loss, inputs, constants, MASK, impl=impl)
    got[8] = got[8].view(N, D)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_the_largest_ratio_is_that_of_the_tokens_that_count(impl, chunk_bytes):
    (hidden, weight, bias), (tokens, old, advantages) = sample()
    log_p = (hidden @ weight.T + bias).log_softmax(-1)[range(N), tokens]
    old = log_p - torch.linspace(0, 1, N)
    old[MASK.nonzero()[-1]] = log_p[MASK.nonzero()[-1]] - 0.25
    old[~MASK] = -50.0
    expected = torch.linspace(0, 1, N)[MASK][:-1].amax().clamp(min=0.25).exp()
    options = {"bias": bias, "chunk_bytes": chunk_bytes, "impl": impl}
    result = linear_ppo_loss(hidden, weight, tokens, old, advantages, MASK, **options)
    assert_close(result.ratio_max, expected)
    nothing = linear_ppo_loss(hidden, weight, tokens, old, advantages, MASK & False, **options)
    assert nothing.ratio_max == 0
