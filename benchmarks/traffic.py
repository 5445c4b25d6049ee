"""Count the bytes that each operator loads and stores, and its launches, on any machine.

    python benchmarks/traffic.py [--op NAME ...] [--json FILE]

Kernels run in Triton's interpreter, in which every lane that a mask leaves on is counted; what
PyTorch's own operators read and write on the way counts as well. The floor is each input once and
each result once. A GPU moves whole sectors of 32 bytes and has caches, so these are the bytes that
the program asks for: a second pass over the logits shows here, an unaligned row does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__" and os.environ.get("TRITON_INTERPRET") != "1":
    # The interpreter is chosen when a kernel is decorated, so before anything is imported.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})

import numpy as np
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import ppo_kernels as ops
from ppo_kernels._triton import logits, tiling

VOCABULARIES = (32000, 50257, 128256, 151936)
LENGTHS = (512, 1024, 4096)
LONGEST_SCAN = 1024
"""The interpreter takes 62 µs for each element of an associative scan."""

ACCESSES = {
    "create_masked_load": ("load", (0, 1)),
    "create_masked_store": ("store", (0, 2)),
    "create_atomic_rmw": ("both", (1, 3)),
}
"""What the interpreter calls for each access to memory: where its pointers and its mask are."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes, and the names of what was launched: Triton kernels and PyTorch operators.

    Of the latter, views and allocations do not count, nor what the interpreter itself calls. Each
    reads its tensors once and writes its result once, which is the least that it can do.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loaded, self.stored, self.in_kernel = 0, 0, False
        self.launches: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self.in_kernel or func.is_view or "empty" in name:
            return result
        results = result if isinstance(result, (tuple, list)) else [result]
        self.loaded += sum(x.nbytes for x in args if isinstance(x, Tensor))
        self.stored += sum(x.nbytes for x in results if isinstance(x, Tensor))
        self.launches.append(name)
        return result


def _counted_access(original: Any, traffic: Traffic, at: tuple[int, int], kind: str) -> Any:
    pointers_at, mask_at = at

    def access(builder: Any, *args: Any, **kwargs: Any) -> Any:
        pointers = args[pointers_at]
        lanes = np.count_nonzero(np.broadcast_to(args[mask_at].data, pointers.data.shape))
        size = int(lanes) * pointers.get_element_ty().primitive_bitwidth // 8
        traffic.loaded += size * (kind != "store")
        traffic.stored += size * (kind != "load")
        return original(builder, *args, **kwargs)

    return access


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is launched, loaded and stored in this block.

    Raises:
        RuntimeError: kernels are not interpreted in this process.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before the first import of ppo_kernels")
    tiling.ticket(torch.device("cpu"))  # made once per process and stream, not per call
    traffic = Traffic()
    builder, kernel = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    originals = {name: getattr(builder, name) for name in ACCESSES}
    run = kernel.run

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launches.append(self.fn.__name__)
        traffic.in_kernel = True
        try:
            with np.errstate(all="ignore"):
                return run(self, *args, **kwargs)
        finally:
            traffic.in_kernel = False

    for name, (kind, at) in ACCESSES.items():
        setattr(builder, name, _counted_access(originals[name], traffic, at, kind))
    kernel.run = counted_run
    try:
        with traffic:
            yield traffic
    finally:
        kernel.run = run
        for name, original in originals.items():
            setattr(builder, name, original)


class Row(NamedTuple):
    """One line of the report."""

    op: str
    mode: str
    shape: tuple[int, ...]
    dtype: str
    loaded: int
    stored: int
    floor: int
    ratio: float
    launches: list[str]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in _tensors(part)]


def measure(name: str, call: Callable[..., Any], inputs: Sequence[Tensor], learn: int) -> list[Row]:
    """Count the forward pass, and the backward pass to the first `learn` inputs.

    Where a loss computes its gradients in the forward pass, they are among its results there, and
    the backward pass has them as inputs.
    """
    leaves = [x.clone().requires_grad_(i < learn) for i, x in enumerate(inputs)]
    is_loss = name in ("policy_loss", "value_loss", "ppo_loss")
    kept = sum(x.nbytes for x in leaves[:learn]) if is_loss else 0
    with counted() as forward:
        outputs = _tensors(call(*leaves))
    floor = sum(x.nbytes for x in inputs) + sum(x.nbytes for x in outputs) + kept
    rows = [_row(name, "forward", inputs, forward, floor)]
    if learn:
        smooth = [y for y in outputs if y.requires_grad]
        seeds = [torch.ones_like(y) for y in smooth]
        read = kept if is_loss else sum(x.nbytes for x in leaves)
        with counted() as backward:
            torch.autograd.grad(smooth, leaves[:learn], seeds)
        floor = sum(x.nbytes for x in seeds) + read + sum(x.nbytes for x in leaves[:learn])
        rows.append(_row(name, "backward", inputs, backward, floor))
    return rows


def _row(op: str, mode: str, inputs: Sequence[Tensor], traffic: Traffic, floor: int) -> Row:
    largest = max(inputs, key=Tensor.numel)
    dtype = str(largest.dtype).removeprefix("torch.")
    ratio = (traffic.loaded + traffic.stored) / floor
    moved = (traffic.loaded, traffic.stored, floor, round(ratio, 4))
    return Row(op, mode, tuple(largest.shape), dtype, *moved, traffic.launches)


class Case(NamedTuple):
    """An operator, how its inputs are drawn from a shape, and how many of them learn."""

    call: Callable[..., Any]
    inputs: Callable[..., Sequence[Tensor]]
    learn: int = 0


def _over_logits(count: int, tokens: bool = True) -> Callable[..., list[Tensor]]:
    def draw(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
        drawn = [torch.randn(rows, columns).to(dtype) for _ in range(count)]
        return drawn + [torch.randint(columns, (rows,))] * tokens

    return draw


def _over_tokens(floats: int, scores: bool = False) -> Callable[..., list[Tensor]]:
    """[B, T] floats and a mask, all of whose tokens count; scores [B] come first."""

    def draw(rows: int, columns: int) -> list[Tensor]:
        tensors = [torch.randn(rows, columns) for _ in range(floats)]
        first = [torch.randn(rows)] if scores else []
        return [*first, *tensors, torch.ones(rows, columns, dtype=torch.bool)]

    return draw


def _below_checks(op: Callable[..., Any], *last: bool) -> Callable[..., Any]:
    """Call the entry below a public function, which looks at the tokens' range on a CPU only."""
    return lambda z, *inputs: op(z, *inputs, 1.0, z.shape[-1], None, *last)


def _triton(op: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return lambda *inputs: op(*inputs, impl="triton", **settings)


def _ppo_loss(new: Tensor, v: Tensor, old: Tensor, adv: Tensor, *rest: Tensor) -> Any:
    return ops.ppo_loss(new, old, adv, v, *rest, impl="triton")


def _kl_penalty(new: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    return ops.kl_penalty(new, ref, response_mask=mask, estimator="k3", impl="triton")


CASES = {
    "token_logprobs": Case(_below_checks(logits.token_logprobs, False), _over_logits(1), 1),
    "token_logprobs_and_entropy": Case(
        _below_checks(logits.token_logprobs_and_entropy, False), _over_logits(1), 1
    ),
    "categorical_kl": Case(_below_checks(logits.categorical_kl), _over_logits(2, tokens=False), 1),
    "token_statistics": Case(_below_checks(logits.token_statistics), _over_logits(2), 1),
    "gae": Case(_triton(ops.gae), _over_tokens(2)),
    "ppo_advantages": Case(_triton(ops.ppo_advantages, kl_coef=0.05), _over_tokens(3, True)),
    "policy_loss": Case(_triton(ops.policy_loss), _over_tokens(3), 1),
    "value_loss": Case(_triton(ops.value_loss), _over_tokens(3), 1),
    "ppo_loss": Case(_ppo_loss, _over_tokens(6), 2),
    "whiten": Case(_triton(ops.whiten), _over_tokens(1)),
    "masked_moments": Case(_triton(ops.masked_moments), _over_tokens(1)),
    "kl_penalty": Case(_kl_penalty, _over_tokens(2), 1),
    "token_rewards": Case(_triton(ops.token_rewards, kl_coef=0.05), _over_tokens(2, True)),
}


def rows_of(name: str) -> Iterator[Row]:
    """Count an operator at real row lengths and few rows: bytes per row do not depend on others."""
    case = CASES[name]
    if hasattr(logits, name):
        for v in VOCABULARIES:
            yield from measure(name, case.call, case.inputs(2, v, torch.bfloat16), case.learn)
        yield from measure(name, case.call, case.inputs(2, 32000, torch.float32), case.learn)
        return
    for length in LENGTHS:
        if length <= LONGEST_SCAN or name not in ("gae", "ppo_advantages"):
            yield from measure(name, case.call, case.inputs(4, length), case.learn)


def show(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Bytes asked for, against each input once and each result once")
    for heading in ("op", "mode", "shape", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("loaded", "stored", "floor", "ratio", "launches"):
        table.add_column(heading, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        moved = (f"{n:,}" for n in (row.loaded, row.stored, row.floor))
        numbers = (*moved, f"{row.ratio:.4f}", str(len(row.launches)))
        table.add_row(row.op, row.mode, shape, row.dtype, *numbers)
    console = Console()
    Console(width=max(console.width, 120)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = [row for name in options.op for row in rows_of(name)]
    show(rows)
    if options.json:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        report = {"versions": versions, "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
