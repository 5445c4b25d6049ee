"""What the launchers ask of Triton, without a GPU: launches are recorded instead of run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton's launcher")

from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import ppo_kernels as ops
from ppo_kernels import _dispatch
from ppo_kernels._triton._compile import TARGETS, CompileSpec, compile_for

TARGET = TARGETS["sm_90"]
WITH_SPECS = ("logits", "gae", "rewards", "whiten", "losses")
SIZES = [1, 2, 3, 7, 16, 33, 64, 65, 100, 128, 256, 257, 1000, 1024, 2048, 4096]


class Launch(NamedTuple):
    """A launch as Triton's own binder sees it; Triton compiles once for each key."""

    kernel: JITFunction
    specialization: tuple[Any, ...]
    """(type, what is known of the value) of each parameter, as in Triton's cache key."""
    values: dict[str, Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        constants = [self.values[n] for n in self.names_of("constexpr")]
        return f"{self.kernel.__name__} {self.specialization} {constants} {self.options}"

    def names_of(self, kind: str) -> list[str]:
        pairs = zip(self.kernel.arg_names, self.specialization, strict=True)
        return [name for name, (type_, _) in pairs if type_ == kind]

    @property
    def chosen(self) -> tuple[Any, ...]:
        """What a launcher decides on: the parameters that kernels declare as compile-time."""
        names = [p.name for p in self.kernel.params if p.is_constexpr]
        return self.kernel.__name__, *((n, self.values[n]) for n in names), *self.options.items()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches from now on, of tensors on the CPU, whose results hold nothing."""
    seen: list[Launch] = []
    backend = make_backend(TARGET)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        values, specialization, options = bind(*args, **kwargs)
        assert all(0 < n < 2**31 for n in grid)
        seen.append(Launch(self, tuple(specialization), values, options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(_dispatch, "_require_triton", lambda *_: None)
    return seen


def differentiate(result: Any, *leaves: Tensor) -> None:
    first = result if isinstance(result, Tensor) else result[0]
    torch.autograd.grad(first, leaves, torch.ones_like(first))


def draw(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(count)]


def logits_ops(z: Tensor, ref: Tensor) -> None:
    a = torch.zeros(z.shape[:-1], dtype=torch.int64)
    z.requires_grad_()
    for op in (ops.token_logprobs, ops.token_logprobs_and_entropy):
        differentiate(op(z, a, impl="triton"), z)
    statistics = ops.token_statistics(z, ref, a, impl="triton")
    differentiate(sum(statistics[:3]), z)
    differentiate(ops.categorical_kl(z, ref, impl="triton"), z)


def scans(*x: Tensor, mask: Tensor) -> None:
    scores = x[0][:, 0]
    ops.gae(*x[:2], mask, impl="triton")
    ops.gae(*x[:2], mask, bootstrap_values=scores, impl="triton")
    ops.token_rewards(scores, *x[:2], mask, kl_coef=0.1, estimator="k3", impl="triton")
    ops.ppo_advantages(scores, *x[:3], mask, kl_coef=0.1, estimator="k3", impl="triton")


def elementwise(*x: Tensor, mask: Tensor) -> None:
    moments = ops.masked_moments(x[0], mask, impl="triton")
    ops.whiten(x[0], mask, moments=moments, impl="triton")
    ops.whiten(x[0], mask, impl="triton")
    new = x[0].detach().requires_grad_()
    for estimator in ("k1", "k3"):
        kl = ops.kl_penalty(new, x[1], response_mask=mask, estimator=estimator, impl="triton")
        differentiate(kl, new)


def losses(*x: Tensor, mask: Tensor) -> None:
    new, v = (y.detach().requires_grad_() for y in x[:2])
    for weights in (mask, mask / mask.sum()):
        differentiate(ops.policy_loss(new, *x[2:4], weights, impl="triton"), new)
        differentiate(ops.value_loss(v, *x[4:6], weights, impl="triton"), v)
        both = ops.ppo_loss(new, *x[2:4], v, *x[4:6], weights, impl="triton")
        differentiate(both, new, v)
        with torch.no_grad():
            ops.ppo_loss(new, *x[2:4], v, *x[4:6], weights, impl="triton")


TOKEN_OPS = [scans, elementwise, losses]


def contiguous(rows: int, length: int) -> tuple[list[Tensor], Tensor]:
    return draw(6, rows, length), torch.ones(rows, length, dtype=torch.bool)


def part_of_longer(rows: int, length: int) -> tuple[list[Tensor], Tensor]:
    x, mask = contiguous(rows, length + 8)
    return [y[:, :length] for y in x], mask[:, :length]


@pytest.mark.parametrize("layout", [contiguous, part_of_longer])
@pytest.mark.parametrize("run", TOKEN_OPS)
def test_new_b_and_t_compile_nothing(
    run: Callable[..., None], layout: Callable[..., Any], launches: list[Launch]
) -> None:
    """Only what a launcher decides on tells compilations apart, and its decisions are few.

    Two at most where rows are not whole vectors: the second of two gradients that share memory
    may then start anywhere.
    """
    for rows in (1, 2, 3, 16, 65):
        for length in SIZES:
            x, mask = layout(rows, length)
            run(*x, mask=mask)
    keys: dict[Any, set[str]] = {}
    for launch in launches:
        absent = tuple(n for n, value in launch.values.items() if value is None)
        types = tuple(type_ for type_, _ in launch.specialization)
        keys.setdefault((launch.chosen, absent, types), set()).add(launch.key)
    assert all(len(of_one) <= 1 + (("VEC", 1) in chosen) for (chosen, *_), of_one in keys.items())
    assert len(keys) < 40


@pytest.mark.parametrize("rows", [(1, 1), (1, 16), (3, 7), (16, 16)])
@pytest.mark.parametrize("columns", [5000, 5001, 5008, 32000, 50257, 151936])
def test_new_rows_and_vocabularies_compile_nothing(
    rows: tuple[int, int], columns: int, launches: list[Launch]
) -> None:
    for shape in ((2, 5, 4999), (*rows, columns)):
        logits_ops(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
    half = len(launches) // 2
    assert half >= 8
    assert [x.key for x in launches[:half]] == [x.key for x in launches[half:]]


def test_another_dtype_or_layout_is_another_compilation(launches: list[Launch]) -> None:
    """The recorder can tell compilations apart."""
    z = torch.zeros(2, 3, 64)
    for x in (z, z.bfloat16(), z.transpose(0, 2)):
        ops.token_logprobs(x, torch.zeros(x.shape[:-1], dtype=torch.int64), impl="triton")
    assert len({launch.key for launch in launches}) == 3


ARITHMETIC = {"ESTIMATOR", "SHIFT_MEAN", "SPLIT_MEAN"}
"""Constants that only choose between formulas: specs take the heaviest."""


def configuration(kernel: Any, values: dict[str, Any], num_warps: int) -> tuple[Any, ...]:
    names = [p.name for p in kernel.params if p.is_constexpr and p.name not in ARITHMETIC]
    return kernel.__name__, num_warps, *((n, values[n]) for n in names)


def test_every_configuration_that_is_launched_is_compiled(launches: list[Launch]) -> None:
    """By `test_compile.py`, for four GPUs."""
    modules = (importlib.import_module(f"ppo_kernels._triton.{name}") for name in WITH_SPECS)
    specs: list[CompileSpec] = [spec for module in modules for spec in module.compile_specs()]
    known = {configuration(s.kernel, s.constexprs, s.num_warps) for s in specs}
    for layout in (contiguous, part_of_longer):
        for rows, length in [(r, t) for r in (1, 2, 16) for t in (*SIZES, 16384)]:
            x, mask = layout(rows, length)
            for run in TOKEN_OPS:
                run(*x, mask=mask)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for columns in (1, 7, 2000, 4000, 50257):
            z = torch.zeros(2, 3, columns, dtype=dtype)
            logits_ops(z, z.clone())
            logits_ops(z.detach(), torch.zeros(2 * 3 * columns + 1, dtype=dtype)[1:].view_as(z))
    launched = {configuration(x.kernel, x.values, x.options["num_warps"]) for x in launches}
    assert launched <= known, launched - known
    assert {c[0] for c in launched} == {c[0] for c in known}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("length", [50, 1000, 1001])
@pytest.mark.parametrize("run", TOKEN_OPS)
def test_16_bit_inputs_compile_without_spills(
    run: Callable[..., None], length: int, target: str, launches: list[Launch]
) -> None:
    x, mask = draw(6, 4, length, dtype=torch.bfloat16), torch.ones(4, length, dtype=torch.bool)
    run(*x, mask=mask)
    for launch in {launch.key: launch for launch in launches}.values():
        report = compile_for(spec_of(launch), TARGETS[target])
        assert (report.spills, report.local, report.stack, report.f64) == (0, 0, 0, 0), report


def spec_of(launch: Launch) -> CompileSpec:
    constants = launch.names_of("constexpr")
    pairs = zip(launch.kernel.arg_names, launch.specialization, strict=True)
    types = {n: (type_, known) for n, (type_, known) in pairs if n not in constants}
    return CompileSpec(
        launch.kernel,
        {n: type_ for n, (type_, _) in types.items()},
        {n: launch.values[n] for n in constants},
        {n: 16 for n, (_, known) in types.items() if known and "D" in known},
        num_warps=launch.options["num_warps"],
        num_stages=launch.options.get("num_stages", 3),
        label=launch.key,
    )


class NoRead(TorchDispatchMode):
    """Refuse what makes the host wait for a GPU: to read a number from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(x in name for x in ("_local_scalar_dense", "nonzero", "is_nonzero")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("run", TOKEN_OPS)
def test_the_host_never_waits(run: Callable[..., None], launches: list[Launch]) -> None:
    x, mask = contiguous(3, 40)
    with NoRead():
        run(*x, mask=mask)


def test_the_host_never_waits_for_logits(launches: list[Launch]) -> None:
    """Below the public functions: the range of tokens is looked at on a CPU, and only there."""
    from ppo_kernels._triton import logits

    z, ref = torch.zeros(2, 2, 3, 40)
    a, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    z.requires_grad_()
    with NoRead():
        differentiate(logits.token_logprobs_and_entropy(z, a, 1.0, 40, mask, False), z)
        differentiate(logits.token_statistics(z, ref, a, 1.0, 40, mask), z)
        differentiate(logits.categorical_kl(z, ref, 1.0, 40, mask), z)


def test_reading_a_number_is_noticed() -> None:
    with NoRead(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ones(()).item()
