"""Every operator on a real GPU: values, sizes, determinism, graphs, and no waiting.

`GPU_TESTS_ON=cpu TRITON_INTERPRET=1 pytest tests/kernels/test_gpu.py` tries what the interpreter
can, so that this file does not rot where there is no GPU.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import ppo_kernels as ops
from ppo_kernels.testing import assert_within_error_budget

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE != "cpu"
pytestmark = [pytest.mark.gpu] + [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
] * ON_GPU
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the interpreter cannot show this")


@pytest.fixture(autouse=True)
def plain_memory():
    """Do not fill fresh memory, which takes other kernels; infinities pass without a warning."""
    torch.use_deterministic_algorithms(False)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield


class Op(NamedTuple):
    call: Callable[..., Any]
    learn: int = 0  # how many of the first inputs get a gradient


# fmt: off
OVER_LOGITS = {  # logits, reference logits, tokens, mask
    "token_logprobs": Op(lambda z, r, a, m, **k: ops.token_logprobs(z, a, response_mask=m, **k), 1),
    "token_logprobs_and_entropy": Op(lambda z, r, a, m, **k: ops.token_logprobs_and_entropy(
        z, a, response_mask=m, temperature=0.7, **k), 1),
    "categorical_kl": Op(lambda z, r, a, m, **k: ops.categorical_kl(z, r, response_mask=m, **k), 1),
    "token_statistics": Op(lambda z, r, a, m, **k: ops.token_statistics(
        z, r, a, response_mask=m, **k)[:3], 1),
}
OVER_TOKENS = {  # six tensors of floats, mask
    "gae": Op(lambda x, y, *_, m, **k: ops.gae(x, y, m, gamma=0.99, **k)),
    "token_rewards": Op(lambda x, y, *_, m, **k: ops.token_rewards(
        x[:, 0], x, y, m, kl_coef=0.1, estimator="k3", **k)),
    "ppo_advantages": Op(lambda x, y, v, *_, m, **k: ops.ppo_advantages(
        x[:, 0], x, y, v, m, kl_coef=0.1, bootstrap_values=y[:, 0], **k)),
    "masked_moments": Op(lambda x, *_, m, **k: ops.masked_moments(x, m, **k)),
    "whiten": Op(lambda x, *_, m, **k: ops.whiten(x, m, **k)),
    "whiten_given": Op(lambda x, y, *_, m, **k: ops.whiten(
        x, m, moments=ops.masked_moments(y, m, **k), **k)),
    "kl_penalty": Op(lambda x, y, *_, m, **k: ops.kl_penalty(
        x, y, response_mask=m, estimator="k3", **k), 2),
    "policy_loss": Op(lambda x, _, old, adv, *__, m, **k: ops.policy_loss(
        x, old, adv, m, dual_clip=3.0, **k), 1),
    "value_loss": Op(lambda v, _, old, ret, *__, m, **k: ops.value_loss(
        v, old, ret, m / m.sum(), **k), 1),
    "ppo_loss": Op(lambda x, v, old, adv, old_v, ret, m, **k: ops.ppo_loss(
        x, old, adv, v, old_v, ret, m, **k), 2),
}
# fmt: on
ALL = OVER_LOGITS | OVER_TOKENS


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in flat(part)]


def run(op: Op, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Results, and the gradients of a fixed weighted sum of those that have one."""
    leaves = [x.detach().requires_grad_(i < op.learn) for i, x in enumerate(inputs)]
    results = flat(op.call(*leaves[:-1], m=leaves[-1], **options))
    if not op.learn:
        return results
    smooth = [x for x in results if x.requires_grad]
    seeds = [torch.linspace(0.5, 1.5, x.numel(), device=x.device).view(x.shape) for x in smooth]
    return [*(x.detach() for x in results), *torch.autograd.grad(smooth, leaves[: op.learn], seeds)]


def draw_logits(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    z, r = (torch.randn(rows, columns).mul(3).to(dtype) for _ in range(2))
    return [z, r, torch.randint(columns, (rows,)), torch.arange(rows) % 5 != 3]


def draw_tokens(rows: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x = [torch.randn(rows, length).mul(0.5).to(dtype) for _ in range(6)]
    mask = torch.rand(rows, length) < 0.8
    mask[0, 0] = True
    return [*x, mask]


def check(op: Op, inputs: list[Tensor]) -> None:
    """Against float64 on the CPU, in the budget of float32 on the CPU."""
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    truth, own = run(op, double, impl="reference"), run(op, inputs, impl="reference")
    got = run(op, [x.to(DEVICE) for x in inputs], impl="triton")
    for i, (x, oracle, baseline) in enumerate(zip(got, truth, own, strict=True)):
        tiny = 1e-6 if op in OVER_TOKENS.values() and i >= len(got) - op.learn else None
        assert_within_error_budget(x, oracle, baseline, tiny=tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 31, 2000, 4099, 50257])
@pytest.mark.parametrize("name", OVER_LOGITS)
def test_over_logits(name: str, columns: int, dtype: torch.dtype) -> None:
    check(OVER_LOGITS[name], draw_logits(7 if ON_GPU else 2, columns, dtype))


@pytest.mark.parametrize("length", [1, 3, 50, 64, 250, 1000, 1001, 3000, 5000])
@pytest.mark.parametrize("name", OVER_TOKENS)
def test_over_tokens(name: str, length: int) -> None:
    if length > 250 and not ON_GPU:
        pytest.skip("slow in the interpreter")
    check(OVER_TOKENS[name], draw_tokens(33 if ON_GPU else 3, length))


def inputs_of(name: str, rows: int, size: int) -> list[Tensor]:
    drawn = (
        draw_tokens(rows, size) if name in OVER_TOKENS else draw_logits(rows, size, torch.bfloat16)
    )
    return [x.to(DEVICE) for x in drawn]


BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("name", ALL)
def test_the_same_bits_twenty_times(name: str) -> None:
    rows, size, repeats = (512, 3001, 20) if ON_GPU else (2, 40, 2)
    inputs = inputs_of(name, rows, size)
    runs = [run(ALL[name], inputs, impl="triton") for _ in range(repeats)]
    for x, *others in zip(*runs, strict=True):
        bits = BITS[x.dtype]
        assert all(torch.equal(x.view(bits), y.view(bits)) for y in others)


@needs_gpu
def test_offsets_beyond_int32() -> None:
    """[1, 14145, 151936] in bfloat16: row 14140 starts beyond 2³¹ elements."""
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB")
    rows, columns = 14145, 151936
    z = torch.zeros(1, rows, columns, dtype=torch.bfloat16, device=DEVICE)
    z[0, 14140, 7] = 20
    a = torch.zeros(1, rows, dtype=torch.int64, device=DEVICE)
    a[0, 14140] = 7
    z.requires_grad_()
    logprobs, entropy = ops.token_logprobs_and_entropy(z, a)
    want = torch.full((rows,), -11.931214659, device=DEVICE)
    want[14140] = -3.13112e-4
    torch.testing.assert_close(logprobs[0], want, rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy[0, 0].item(), math.log(columns))
    (gradient,) = torch.autograd.grad(logprobs.sum(), z)
    assert gradient[0, 14140, 7].item() == pytest.approx(3.1307e-4, rel=2**-7)
    others = gradient[0, torch.arange(rows, device=DEVICE) != 14140]
    assert (others[:, 0] == 1).all()
    assert (others[:, 1:] == others[0, 1]).all()
    assert others[0, 1].item() == pytest.approx(-1 / columns, rel=2**-7)
    assert (ops.categorical_kl(z.detach(), z.detach()) == 0).all()


@needs_gpu
def test_more_rows_than_a_grid_has_in_its_second_dimension() -> None:
    rows = 65537
    z = torch.zeros(rows, 32, dtype=torch.bfloat16, device=DEVICE)
    a = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    want = torch.full((rows,), -3.465735903, device=DEVICE)
    torch.testing.assert_close(ops.token_logprobs(z, a), want)
    assert (ops.categorical_kl(z, z) == 0).all()
    inputs = [x.to(DEVICE) for x in draw_tokens(rows, 2)]
    for op in OVER_TOKENS.values():
        compare(op, inputs)


def compare(op: Op, inputs: list[Tensor]) -> None:
    for x, y in zip(run(op, inputs, impl="triton"), run(op, inputs, impl="torch"), strict=True):
        tolerance = 1e-4 if x.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(x, y, rtol=tolerance, atol=1e-4)


@needs_gpu
def test_every_configuration_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice of the launchers that is compiled without a GPU is launched here."""
    from triton.runtime.jit import JITFunction

    from ppo_kernels._triton import gae, logits, losses, rewards, whiten

    launched, original = set(), JITFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        constants = {p.name: kwargs[p.name] for p in self.params if p.is_constexpr}
        launched.add(tile_of(self, constants))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", recorded)
    for length in (1, 51, 52, 200, 201, 1000, 1001, 3000, 3001):
        drawn = [x.to(DEVICE) for x in draw_tokens(9, length + 8)]
        parts = [x[:, :length] for x in drawn]
        for op in OVER_TOKENS.values():
            for inputs in (parts, [x[:2] for x in parts], [x.contiguous() for x in parts]):
                compare(op, inputs)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for columns in (1000, 1001, 9000, 9001):
            z, r, a, m = (x.to(DEVICE) for x in draw_logits(6, columns, dtype))
            shifted = torch.cat([r.new_zeros(1), r.flatten()])[1:].view_as(r)
            apart = z.repeat_interleave(2, 1)[:, ::2]
            for op in OVER_LOGITS.values():
                compare(op, [z, r, a, m])
                compare(op, [z, shifted, a, m])
                compare(op, [apart, r, a, m])
    specs = [s for module in (gae, logits, losses, rewards, whiten) for s in module.compile_specs()]
    wanted = {tile_of(s.kernel, s.constexprs) for s in specs}
    assert wanted <= launched, wanted - launched


def tile_of(kernel: Any, constants: dict[str, Any]) -> tuple[Any, ...]:
    names = ("ROWS", "COLS", "VEC", "LANES", "UNROLL", "UNIT", "MOMENTS")
    return kernel.__name__, *(constants.get(name) for name in names)


def test_compiled_graph() -> None:
    z, r, a, m = inputs_of("token_statistics", 8, 5000 if ON_GPU else 50)
    x = inputs_of("ppo_loss", 1, 8)

    def loss(z: Tensor) -> Tensor:
        logprobs, entropy, kl, _ = ops.token_statistics(z, r, a, response_mask=m)
        advantages = ops.whiten(ops.gae(x[2], x[3], x[-1])[0], x[-1])
        new, v = logprobs[None], x[1]
        return ops.ppo_loss(new, *x[2:3], advantages, v, *x[4:]).loss + (kl - entropy).mean()

    backend = "inductor" if ON_GPU else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradients = []
    for function in (loss, compiled):
        value = function(leaf := z.detach().requires_grad_())
        gradients.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(*gradients)


@needs_gpu
@pytest.mark.parametrize("name", ALL)
def test_cuda_graph(name: str) -> None:
    inputs = inputs_of(name, 33, 3001)
    later = inputs_of(name, 33, 3001)
    want = run(ALL[name], later, impl="triton")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(ALL[name], inputs, impl="triton")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(ALL[name], inputs, impl="triton")
    for x, y in zip(inputs, later, strict=True):
        x.copy_(y)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@needs_gpu
@pytest.mark.parametrize("name", ALL)
def test_the_host_never_waits(name: str) -> None:
    inputs = inputs_of(name, 33, 300)
    run(ALL[name], inputs)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(ALL[name], inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_two_streams_at_once() -> None:
    """Each stream has a ticket of its own."""
    x, *_, mask = inputs_of("masked_moments", 512, 4096)
    want = ops.masked_moments(x, mask)
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(100):
        with torch.cuda.stream(streams[i % 2]):
            got.append(ops.masked_moments(x, mask))
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in got)
