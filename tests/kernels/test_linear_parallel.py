"""A vocabulary spread over ranks gives the numbers of one rank."""

import functools
import math
import os
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ppo_kernels import reference
from ppo_kernels._linear.parallel import combine_shards
from ppo_kernels.linear_token_logprobs import (
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
)
from ppo_kernels.testing import assert_within_error_budget

N, D, V, SPLIT = 9, 6, 37, 20


def sample(dtype=torch.float64):
    """hidden, weight, bias, tokens, mask; a token per shard edge, one ignored, one masked."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((N, D), (V, D), (V,))
    )
    tokens = torch.tensor([0, SPLIT - 1, SPLIT, V - 1, 5, 30, -100, 7, 33])
    mask = torch.arange(N) != 7
    hidden[6:8] = math.nan
    return hidden, weight, bias, tokens, mask


def upstream(dtype):
    return torch.linspace(-1, 1, 2 * N, dtype=dtype).view(2, N)


def on_rank(rank, store, head, dtype):
    """Write one rank's results, and the gradients of its shard, to a file."""
    torch.set_num_threads(1)
    address = f"file://{store}/rendezvous"
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", address, timeout, 2, rank)
    hidden, weight, bias, tokens, mask = sample(dtype)
    own = slice(0, SPLIT) if rank == 0 else slice(SPLIT, V)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight[own], bias[own])]
    shard = {"process_group": dist.group.WORLD, "vocab_start": own.start}
    shared = {"bias": leaves[2], "response_mask": mask, "chunk_bytes": 400, **head, **shard}
    both = linear_token_logprobs_and_entropy(*leaves[:2], tokens, **shared)
    grads = torch.autograd.grad(both, leaves, tuple(upstream(both[0].dtype)))
    alone = linear_token_logprobs(*leaves[:2], tokens, **shared)
    alone_grads = torch.autograd.grad(alone, leaves, upstream(both[0].dtype)[0])
    results = [x.detach() for x in (*both, *grads, alone, *alone_grads)]
    torch.save(results, f"{store}/{rank}")
    dist.destroy_process_group()


def on_both_ranks(head, dtype):
    """Results of both ranks; the gradients of weight and bias are joined."""
    with tempfile.TemporaryDirectory() as store:
        context = mp.start_processes(
            functools.partial(on_rank, store=store, head=head, dtype=dtype),
            nprocs=2,
            join=False,
            start_method="spawn",
        )
        deadline = time.monotonic() + 240
        while not context.join(timeout=10):
            assert time.monotonic() < deadline, "a rank hangs"
        first, second = (torch.load(os.path.join(store, str(rank))) for rank in range(2))
    for i in (0, 1, 2, 5, 6):
        assert torch.equal(first[i], second[i]), "the ranks disagree"
    whole = [*first[:3], torch.cat([first[3], second[3]]), torch.cat([first[4], second[4]])]
    return [
        *whole, first[5], first[6],
        torch.cat([first[7], second[7]]), torch.cat([first[8], second[8]]),
    ]  # fmt: skip


def on_one_rank(head, dtype):
    hidden, weight, bias, tokens, mask = sample(dtype)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    shared = {"bias": bias, "response_mask": mask, **head}
    both = reference.linear_token_logprobs_and_entropy(hidden, weight, tokens, **shared)
    up = upstream(both[0].dtype)
    grads = torch.autograd.grad(both, leaves, tuple(up), retain_graph=True)
    alone_grads = torch.autograd.grad(both[0], leaves, up[0])
    return [*both, *grads, both[0], *alone_grads]


IMPLS = ["torch", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
HEADS = [
    {"temperature": 0.7},
    {"logit_softcap": 2.0, "logit_scale": 3.0, "temperature": 1.5},
]


@pytest.mark.parametrize("head", HEADS, ids=["plain", "softcap"])
def test_two_ranks_give_the_result_of_one(head):
    for got, want in zip(
        on_both_ranks(head, torch.float64), on_one_rank(head, torch.float64), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_two_ranks_in_float32_are_as_exact_as_one(impl):
    head = {"temperature": 0.7}
    results = on_both_ranks({**head, "impl": impl}, torch.float32)
    oracle, baseline = on_one_rank(head, torch.float64), on_one_rank(head, torch.float32)
    for got, want, own in zip(results, oracle, baseline, strict=True):
        assert_within_error_budget(got, want, own)


def parts_of(z, token, shards, temperature):
    """What each shard sends, from its logits alone: [R, 1, 5]."""
    parts, start = [], 0
    for x in z.split(shards):
        top = x.max()
        p = torch.distributions.Categorical(logits=x / temperature)
        owned = start <= token < start + len(x)
        at = x[token - start] if owned else x[0]
        log_s = (x / temperature).logsumexp(0) - top / temperature
        parts.append([top, log_s, p.entropy(), at, owned])
        start += len(x)
    return torch.tensor(parts, dtype=z.dtype)[:, None]


@pytest.mark.parametrize("shards", [[12], [5, 7], [1, 1, 10], [4, 4, 4]])
@pytest.mark.parametrize("token", [0, 4, 5, 11])
def test_shards_combine_to_the_whole(shards, token):
    z = torch.randn(12, dtype=torch.float64) * 3
    z[:5] += 200  # a shard may hold next to nothing
    parts = parts_of(z, token, shards, 0.7)
    logprobs, entropy, stats = combine_shards(parts, 0.7, 1.0)
    whole = torch.distributions.Categorical(logits=z / 0.7)
    torch.testing.assert_close(logprobs[0], whole.log_prob(torch.tensor(token)))
    torch.testing.assert_close(entropy[0], whole.entropy())
    total = stats[0, 0] / 0.7 + stats[0, 1]
    torch.testing.assert_close(total, (z / 0.7).logsumexp(0))


def test_unit_of_the_sums_does_not_matter():
    parts = parts_of(torch.randn(9, dtype=torch.float64), 3, [4, 5], 1.3)
    want = combine_shards(parts, 1.3, 1.0)
    bits = parts.clone()
    bits[..., 1:3] /= math.log(2)
    got = combine_shards(bits, 1.3, math.log(2))
    torch.testing.assert_close(got[:2], want[:2])
    torch.testing.assert_close(got[2][:, 1:] * math.log(2), want[2][:, 1:])


@pytest.mark.parametrize(
    ("top", "log_s"), [(-math.inf, math.nan), (-3.4028234663852886e38, -math.inf)]
)
def test_shard_without_any_logit_has_no_effect(top, log_s):
    parts = parts_of(torch.randn(9, dtype=torch.float64), 3, [4, 5], 1.0)
    banned = torch.tensor([top, log_s, math.nan, -math.inf, 0], dtype=torch.float64)
    got = combine_shards(torch.cat([parts, banned[None, None]]), 1.0, 1.0)
    torch.testing.assert_close(got, combine_shards(parts, 1.0, 1.0))


def test_banned_token_and_token_of_no_shard():
    parts = parts_of(torch.randn(9, dtype=torch.float64), 3, [4, 5], 1.0)
    parts[0, 0, 3] = -math.inf
    assert combine_shards(parts, 1.0, 1.0)[0].item() == -math.inf
    parts[..., 4] = 0
    logprobs, entropy, _ = combine_shards(parts, 1.0, 1.0)
    assert logprobs.isnan().all()
    assert entropy.isnan().all()


def test_refusals():
    hidden, weight, _, tokens, _ = sample()
    with pytest.raises(ValueError, match=r"^vocab_start must be 0 without process_group, got 3$"):
        linear_token_logprobs(hidden, weight, tokens, vocab_start=3)
