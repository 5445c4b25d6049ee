"""Log-probabilities from logits: memory, refusals, autograd and the compiler."""

import math
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from ppo_kernels import token_logprobs


def grad_of(logits, tokens, **options):
    """Values and gradient of their sum."""
    logits = logits.detach().requires_grad_()
    logprobs = token_logprobs(logits, tokens, **options)
    (grad,) = torch.autograd.grad(logprobs.sum(), logits)
    return logprobs.detach(), grad


def test_pieces_of_any_size_give_the_same(monkeypatch):
    logits, tokens = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    mask = torch.rand(3, 7) < 0.6
    whole = grad_of(logits, tokens, response_mask=mask, impl="torch")
    for rows in (1, 2, 5):
        monkeypatch.setattr("ppo_kernels._torch.pieces.CPU_PIECE_BYTES", rows * 11 * 4)
        for x in (logits, logits.transpose(0, 1).contiguous().transpose(0, 1)):
            pieces = grad_of(x, tokens, response_mask=mask, impl="torch")
            assert_close(pieces, whole, rtol=0, atol=1e-7)


def test_only_inputs_are_saved_for_backward():
    logits, saved = torch.randn(50, 400, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        token_logprobs(logits, torch.randint(400, (50,)), impl="torch")
    large = [t for t in saved if t.numel() > 50]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]


def test_memory_beside_the_logits_is_one_piece():
    code = """
import resource, torch, ppo_kernels as pk
logits = torch.zeros(1024, 32768, dtype=torch.bfloat16)  # 64 MiB; a float32 copy has 128
tokens = torch.zeros(1024, dtype=torch.int64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pk.token_logprobs(logits[:4], tokens[:4], impl="torch")
before = peak()
pk.token_logprobs(logits, tokens, impl="torch")
print((peak() - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 24


REFUSALS = [
    (
        {"temperature": 0.0},
        ValueError,
        "temperature must be positive and finite, got 0.0",
    ),
    (
        {"temperature": math.nan},
        ValueError,
        "temperature must be positive and finite, got nan",
    ),
    (
        {"vocab_size": 6},
        ValueError,
        "vocab_size must be in [1, 5] (the last dimension of logits), got 6",
    ),
    (
        {"tokens": torch.tensor([0, 5])},
        ValueError,
        "tokens must be in [0, 5) or -100 where they count, got 5",
    ),
    (
        {"tokens": torch.tensor([-1, 0])},
        ValueError,
        "tokens must be in [0, 5) or -100 where they count, got -1",
    ),
    (
        {"tokens": torch.tensor([0, 3]), "vocab_size": 3},
        ValueError,
        "tokens must be in [0, 3) or -100 where they count, got 3",
    ),
    (
        {"tokens": torch.tensor([0.0, 1.0])},
        TypeError,
        "tokens must be torch.int64, got torch.float32",
    ),
    (
        {"tokens": torch.tensor([0, 1, 2])},
        ValueError,
        "tokens must have shape [2] (logits without V), got [3]",
    ),
    (
        {"response_mask": torch.ones(2)},
        TypeError,
        "response_mask must be bool (True = the token counts), got torch.float32",
    ),
    (
        {"logits": torch.ones(2, 5, dtype=torch.int64)},
        TypeError,
        "logits must be a floating-point tensor, got torch.int64",
    ),
    (
        {"impl": "cuda"},
        ValueError,
        "impl must be one of 'auto', 'triton', 'torch', 'reference', got 'cuda'",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSALS)
def test_refusals(change, error, message):
    arguments = {"logits": torch.randn(2, 5), "tokens": torch.tensor([0, 1])} | change
    with pytest.raises(error) as caught:
        token_logprobs(**arguments)
    assert str(caught.value) == message


def test_tensors_on_different_devices_are_refused():
    with pytest.raises(
        ValueError, match=r"tokens must be on cpu \(the device of logits\), got meta"
    ):
        token_logprobs(torch.randn(2, 5), torch.zeros(2, dtype=torch.int64, device="meta"))


def test_second_derivatives_are_refused_except_in_the_reference():
    logits, token = torch.randn(1, 3, requires_grad=True), torch.tensor([0])
    (grad,) = torch.autograd.grad(
        token_logprobs(logits, token, impl="torch").sum(), logits, create_graph=True
    )
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        grad[0, 0].backward()
    (grad,) = torch.autograd.grad(
        token_logprobs(logits, token, impl="reference").sum(), logits, create_graph=True
    )
    (second,) = torch.autograd.grad(grad[0, 0], logits)
    p = logits.detach().softmax(-1)[0]
    assert_close(second[0], -p[0] * (torch.tensor([1.0, 0, 0]) - p), rtol=1e-5, atol=1e-6)


def test_autocast_leaves_float32(impl):
    logits, tokens = torch.randn(3, 9), torch.randint(9, (3,))
    with torch.autocast("cpu", torch.bfloat16):
        inside = token_logprobs(logits, tokens, impl=impl)
    assert torch.equal(inside, token_logprobs(logits, tokens, impl=impl))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(impl, backend):
    def loss(x, tokens):
        return token_logprobs(2 * x, tokens, temperature=0.9, impl=impl).sum()

    x, tokens = torch.randn(3, 4, 9, requires_grad=True), torch.randint(9, (3, 4))
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(compiled(x, tokens), x)
    (want,) = torch.autograd.grad(loss(x, tokens), x)
    assert_close(got, want, rtol=0, atol=1e-6)


def test_token_out_of_range_is_nan_where_nobody_may_look(impl):
    # Compiled, as on a GPU, tokens are not looked at beforehand; nothing is read out of bounds.
    compiled = torch.compile(token_logprobs, fullgraph=True, backend="eager")
    got = compiled(torch.randn(3, 5), torch.tensor([0, 5, -1]), impl=impl)
    assert got.isnan().tolist() == [False, True, True]


def test_opcheck():
    x, tokens = torch.randn(2, 3, 8, requires_grad=True), torch.randint(8, (2, 3))
    forward = torch.ops.ppo_kernels.torch_token_statistics.default
    backward = torch.ops.ppo_kernels.torch_token_statistics_backward.default
    mask, g = tokens > 2, torch.randn(2, 3)
    torch.library.opcheck(forward, (x, None, tokens, mask, 1.0, 8, True, False))
    torch.library.opcheck(forward, (x, torch.randn(2, 3, 8), tokens, None, 0.7, 8, True, False))
    given = (x.detach(), None, tokens, mask, g, g, None, 1.0, 8)
    torch.library.opcheck(backward, given)
