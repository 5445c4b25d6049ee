"""Operators over hidden states: matmuls, memory, refusals, autograd, autocast, the compiler."""

import re
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels._linear import logprobs as logprobs_op
from ppo_kernels._linear.head import Gradients, Head, Settings, Wanted
from ppo_kernels._linear.rows import Chunks, rows_per_chunk
from ppo_kernels.linear_categorical_kl import linear_categorical_kl
from ppo_kernels.linear_ppo_loss import linear_ppo_loss
from ppo_kernels.linear_token_logprobs import (
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
)

V, D, N = 11, 4, 8


def sample(dtype=torch.float32):
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(V, (N,))


@pytest.fixture
def matmuls(monkeypatch):
    """Rows of the first operand of every matrix product."""
    rows = []
    for name, operand in (("mm", 0), ("addmm", 1)):
        original = getattr(torch, name)

        def counting(*args, original=original, operand=operand, **options):
            rows.append(len(args[operand]))
            return original(*args, **options)

        monkeypatch.setattr(torch, name, counting)
    return rows


TWO_CHUNKS = {"chunk_bytes": 5 * V * 4, "impl": "torch"}


def test_matmuls_of_the_token_form(matmuls):
    hidden, weight, tokens = sample()
    result = linear_token_logprobs(hidden, weight, tokens, **TWO_CHUNKS)
    assert matmuls == [4, 4]
    matmuls.clear()
    result.sum().backward()
    assert matmuls == [4, 4, V] * 2  # logits, d hidden, d weight


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_cost_no_matmul(frozen, matmuls):
    hidden, weight, tokens = sample()
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    linear_token_logprobs(hidden, weight, tokens, **TWO_CHUNKS).sum().backward()
    assert sorted(matmuls) == sorted([4] * 4 + ([V] * 2 if frozen == "hidden" else [4] * 2))


def test_masked_rows_cost_no_matmul_on_a_cpu(matmuls):
    hidden, weight, tokens = sample()
    mask = torch.tensor([True, False, False, True, False, True, False, False])
    linear_token_logprobs(hidden, weight, tokens, response_mask=mask, impl="torch")
    assert matmuls == [3]


@pytest.mark.parametrize("head", [{}, {"logit_softcap": 2.0}])
def test_devices_that_cannot_be_looked_at_multiply_zeros(head, matmuls, monkeypatch, impl):
    """What a GPU does: every row stays in, and what does not count reaches nothing."""
    hidden, weight, tokens = sample()
    mask = torch.tensor([True, False, True, True, False, True, False, True])
    hidden.data[~mask] = torch.nan
    old, advantages = (torch.where(mask, torch.randn(N), torch.nan) for _ in range(2))
    results = []
    for readable in (False, True):
        monkeypatch.setattr("ppo_kernels._linear.rows._is_readable", lambda _, x=readable: x)
        matmuls.clear()
        x = {"response_mask": mask, "impl": impl if not readable else "reference", **head}
        both = linear_token_logprobs_and_entropy(hidden, weight, tokens, **x)
        assert readable or impl == "reference" or matmuls == [N]
        kl = linear_categorical_kl(hidden, weight, hidden, weight.flip(0), **x)
        del x["response_mask"]
        loss = linear_ppo_loss(hidden, weight, tokens, old, advantages, mask, **x).loss
        value = both[0].sum() + both[1].square().sum() + kl.sum() + loss
        results.append([*both, kl, loss, *torch.autograd.grad(value, (hidden, weight))])
    assert_close(*results, rtol=1e-5, atol=1e-5)
    assert (results[0][4][~mask] == 0).all()


def test_matmuls_of_the_loss(matmuls):
    hidden, weight, tokens = sample()
    x = (hidden, weight, tokens, torch.zeros(N), torch.ones(N), torch.ones(N).bool())
    loss = linear_ppo_loss(*x, **TWO_CHUNKS).loss
    assert matmuls == [4, 4, V] * 2
    loss.backward()
    assert matmuls == [4, 4, V] * 2
    matmuls.clear()
    with torch.no_grad():
        linear_ppo_loss(*x, **TWO_CHUNKS)
    assert matmuls == [4, 4]


def test_nothing_is_allocated_for_frozen_inputs():
    hidden, weight = (x.detach() for x in sample()[:2])
    settings = Settings(1.0, 1.0, None, None, torch.float32)
    head, chunks = Head(weight, None, settings), Chunks(torch.ones(N).bool(), 8)
    totals = Gradients(hidden, weight, None, chunks, Wanted(True, False, False))
    totals.add(head, slice(0, N), hidden, torch.randn(N, V))
    assert totals.weight is None
    assert [x.numel() for x in totals.results()] == [N * D, 0, 0]


@pytest.mark.parametrize("name", ["token form", "loss"])
def test_peak_memory_is_a_chunk_and_the_gradients(name):
    code = """
import resource, torch
from ppo_kernels.linear_token_logprobs import linear_token_logprobs
from ppo_kernels.linear_ppo_loss import linear_ppo_loss
torch.set_num_threads(1)
def step(n):
    hidden = torch.randn(n, 16, requires_grad=True)
    tokens, ones = torch.zeros(n, dtype=torch.int64), torch.ones(n)
    if {name!r} == "loss":
        result = linear_ppo_loss(hidden, weight, tokens, ones, ones, ones, chunk_bytes=4 << 20)
        result.loss.backward()
    else:
        linear_token_logprobs(hidden, weight, tokens, chunk_bytes=4 << 20).sum().backward()
weight = torch.randn(65536, 16, requires_grad=True)  # 4 MiB
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(32)
before = peak()
step(1024)  # all logits: 256 MiB
print((peak() - before) // 1024)
"""
    code = code.replace("{name!r}", repr(name))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 32


@pytest.mark.parametrize("rows", range(1, 12))
def test_chunks_are_even_and_cover_every_row_once(rows):
    chunks = Chunks(torch.ones(10).bool(), rows)
    parts = list(chunks)
    assert torch.cat([torch.arange(10)[part] for part in parts]).tolist() == list(range(10))
    assert len(parts) == chunks.count == -(-10 // rows)
    assert max(p.stop - p.start for p in parts) == chunks.size <= rows


def test_default_chunk():
    row = 128256 * 2
    assert rows_per_chunk(None, row, torch.device("cpu")) == (64 << 20) // row
    assert rows_per_chunk(None, row, torch.device("cuda")) == (1 << 30) // row == 4185
    assert rows_per_chunk(None, 4 * row, torch.device("cuda")) == 2048
    assert rows_per_chunk(1, row, torch.device("cuda")) == 1


def arguments(**changed):
    x = {"hidden": torch.zeros(3, D), "weight": torch.zeros(V, D)}
    x |= {"tokens": torch.zeros(3, dtype=torch.int64), **changed}
    return x


REFUSALS = [
    ({"hidden": torch.zeros(3, 5)}, ValueError,
     "hidden must have shape [..., 4] (D of weight), got [3, 5]"),
    ({"weight": torch.zeros(V, D, 1)}, ValueError,
     "weight must have shape [V, D] with V > 0, got [11, 4, 1]"),
    ({"weight": torch.zeros(0, D)}, ValueError,
     "weight must have shape [V, D] with V > 0, got [0, 4]"),
    ({"weight": torch.zeros(V, D, dtype=torch.bfloat16)}, TypeError,
     "weight must be torch.float32 (the dtype of hidden) outside autocast, got torch.bfloat16"),
    ({"hidden": torch.zeros(3, D, dtype=torch.int64)}, TypeError,
     "hidden must be a floating-point tensor, got torch.int64"),
    ({"bias": torch.zeros(D)}, ValueError, "bias must have shape [11] (V of weight), got [4]"),
    ({"tokens": torch.zeros(4, dtype=torch.int64)}, ValueError,
     "tokens must have shape [3] (hidden without D), got [4]"),
    ({"tokens": torch.zeros(3)}, TypeError, "tokens must be torch.int64, got torch.float32"),
    ({"tokens": torch.tensor([0, 11, -3])}, ValueError,
     "tokens must be in [0, 11) or -100 where they count, got 11"),
    ({"response_mask": torch.ones(3)}, TypeError,
     "response_mask must be bool (True = the token counts), got torch.float32"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
    ({"logit_scale": -1.0}, ValueError, "logit_scale must be positive and finite, got -1.0"),
    ({"logit_softcap": 0.0}, ValueError, "logit_softcap must be positive and finite, got 0.0"),
    ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be positive and finite, got 0"),
    ({"vocab_start": 2}, ValueError, "vocab_start must be 0 without process_group, got 2"),
    ({"process_group": ..., "impl": "reference"}, ValueError,
     "process_group needs impl='triton' or impl='torch'"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), REFUSALS, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("operator", [linear_token_logprobs, linear_token_logprobs_and_entropy])
def test_refusals(operator, changed, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        operator(**arguments(**changed))


def test_refusals_of_the_loss():
    x = arguments(old_logprobs=torch.zeros(3), advantages=torch.zeros(3), weights=torch.ones(3))
    for changed, error, message in (
        ({"weights": torch.ones(3, dtype=torch.int64)}, TypeError, "weights must be bool"),
        ({"weights": torch.ones(2)}, ValueError, "weights must have shape [3]"),
        ({"advantages": torch.ones(3).bool()}, TypeError, "advantages must be a floating"),
        ({"cliprange": 1.0}, ValueError, "cliprange must be in (0, 1), got 1.0"),
        ({"entropy_coef": float("nan")}, ValueError, "entropy_coef must be finite, got nan"),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            linear_ppo_loss(**{**x, **changed})


def test_refusals_of_kl():
    x = {"hidden": torch.zeros(3, D), "weight": torch.zeros(V, D)}
    x |= {"ref_hidden": torch.zeros(3, 2), "ref_weight": torch.zeros(V, 2)}
    for changed, error, message in (
        ({"ref_weight": torch.zeros(9, 2)}, ValueError,
         "V of ref_weight must have shape [11] (V of weight), got [9]"),
        ({"ref_hidden": torch.zeros(4, 2)}, ValueError,
         "ref_hidden without D must have shape [3] (hidden), got [4]"),
        ({"ref_hidden": torch.zeros(3, 2).half(), "ref_weight": torch.zeros(V, 2).half()},
         TypeError, "ref_hidden must be torch.float32 (as hidden), got torch.float16"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            linear_categorical_kl(**{**x, **changed})


def test_differentiable_once():
    hidden, weight, tokens = sample()
    result = linear_token_logprobs(hidden, weight, tokens, impl="torch")
    (grad,) = torch.autograd.grad(result.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        grad.sum().backward()
    ones = torch.ones(N)
    loss = linear_ppo_loss(hidden, weight, tokens, ones, ones, ones, impl="torch").loss
    with pytest.raises(RuntimeError, match="can be differentiated once only"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_autocast_computes_in_its_dtype_and_keeps_gradients_wide():
    hidden, weight, tokens = sample()
    options = {"chunk_bytes": 1, "impl": "torch"}
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_token_logprobs(hidden, weight, tokens, **options)
        grads = torch.autograd.grad(got.sum(), (hidden, weight))
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    want = linear_token_logprobs(*low, tokens, **options)
    low_grads = torch.autograd.grad(want.sum(), low)
    assert torch.equal(got, want)
    assert [x.dtype for x in grads] == [torch.float32] * 2
    assert torch.equal(grads[0], low_grads[0].float())
    assert torch.equal(grads[1].bfloat16(), low_grads[1])
    assert not torch.equal(grads[1], low_grads[1].float())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_that_wait_for_the_backward_pass_change_no_bit(monkeypatch, softcap):
    grads, drawn = [], sample()
    for chunks in (0, 2, 100):
        monkeypatch.setattr("ppo_kernels._linear.rows.CPU_KEPT_CHUNKS", chunks)
        monkeypatch.setattr("ppo_kernels._linear.rows.CPU_CHUNK_BYTES", 200)
        hidden, weight, tokens = drawn
        inputs = hidden, weight
        result = linear_token_logprobs(*inputs, tokens, logit_softcap=softcap, impl="torch")
        grads.append(torch.autograd.grad(result.sum(), inputs, retain_graph=True))
        again = torch.autograd.grad(result.sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(grads[-1], again, strict=True))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_the_gradient_is_no_second_copy_and_may_be_taken_twice():
    hidden, weight, tokens = sample()
    ones = torch.ones(tokens.shape)
    constants = tokens, -ones, ones, ones / len(ones)
    loss = linear_ppo_loss(hidden, weight, *constants, cliprange=0.2, impl="torch").loss
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    twice = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    assert [a.data_ptr() == b.data_ptr() for a, b in zip(once, twice, strict=True)] == [True, True]
    loss.backward(retain_graph=True)
    loss.backward()  # adds to the first one's: it must not be the tensor that is kept
    for leaf, gradient in zip((hidden, weight), once, strict=True):
        assert_close(leaf.grad, 2 * gradient)


def test_many_chunks_of_16_bit_weights_add_in_float32():
    """257 equal contributions: a bfloat16 sum stops growing at 256."""
    hidden = torch.ones(257, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(257, dtype=torch.int64)
    result = linear_token_logprobs(hidden, weight, tokens, chunk_bytes=1, impl="torch")
    (grad,) = torch.autograd.grad(2 * result.sum(), weight)
    assert_close(grad[:, 0].float(), torch.tensor([257.0, -257.0]).bfloat16().float())
    assert grad[0].item() in (256, 258)


def test_opcheck():
    hidden, weight, tokens = sample()
    ones = torch.ones(N)
    head = (1.0, 1.0, None, 200, torch.float32)
    torch.library.opcheck(
        logprobs_op.linear_logprobs, (hidden, weight, None, tokens, *head, True, "torch", 0)
    )
    torch.library.opcheck(
        torch.ops.ppo_kernels.linear_ppo_loss.default,
        (hidden, weight, None, tokens, ones, ones, ones, *head, 0.2, 0.2, None, 0.1, "torch",
         True, True, False),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.ppo_kernels.linear_categorical_kl.default,
        (hidden, weight, None, hidden.detach(), weight.detach(), None, ones.bool(), *head, "torch"),
    )


@pytest.mark.slow
def test_compiles_to_one_graph():
    def step(hidden, weight, tokens, mask):
        x = {"response_mask": mask, "impl": "torch"}
        logprobs, entropy = linear_token_logprobs_and_entropy(hidden, weight, tokens, **x)
        kl = linear_categorical_kl(hidden, weight, hidden, weight.flip(0), **x)
        ones = torch.ones(N)
        loss = linear_ppo_loss(hidden, weight, tokens, ones, ones, mask, impl="torch").loss
        return logprobs.sum() + entropy.sum() + kl.sum() + loss

    hidden, weight, tokens = sample()
    mask = torch.arange(N) % 3 != 0
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        value = function(hidden, weight, tokens, mask)
        results.append([value, *torch.autograd.grad(value, (hidden, weight))])
    assert_close(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_adds_in_float32_and_never_waits():
    torch.manual_seed(0)
    x = torch.randn(300, 64).bfloat16(), torch.randn(1000, 64).bfloat16()
    tokens, advantages = torch.randint(1000, (300,)), torch.randn(300)
    results = []
    for device in ("cpu", "cuda"):
        hidden, weight = (t.to(device).requires_grad_() for t in x)
        constants = [t.to(device) for t in (tokens, advantages - 7, advantages, advantages > -1)]
        options = {"chunk_bytes": 100 * 2000, "entropy_coef": 0.1}
        linear_ppo_loss(hidden, weight, *constants, **options)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        result = linear_ppo_loss(hidden, weight, *constants, **options)
        grads = torch.autograd.grad(result.loss, (hidden, weight))
        torch.cuda.set_sync_debug_mode("default")
        results.append([t.float().cpu() for t in (result.loss, *result.policy, *grads)])
    assert_close(*results, rtol=2e-2, atol=2e-4)
