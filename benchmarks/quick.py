"""Check the main operators on this machine's GPU, then time them against plain PyTorch.

    python benchmarks/quick.py [--json FILE]

A wrong result prints WRONG and ends with exit code 1 before anything is timed. `device` is time on
the device: one CUDA graph of calls on several sets of inputs, together larger than the cache, which
is flushed before each replay. `call` is the time per call without a graph, launches included, and
`eager` is that of the plain PyTorch of reference.py. The floor is each input read once and each
result written once, at the bandwidth of a large copy on this device. Without a GPU the same code
runs on tiny shapes, to show that it works; those times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import ppo_kernels as ops
from ppo_kernels.testing import assert_within_error_budget

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
IMPL = "triton" if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
L2_BYTES = torch.cuda.get_device_properties(0).L2_cache_size if ON_GPU else 0
REPLAYS = 30 if ON_GPU else 1


class Op(NamedTuple):
    """How to call an operator, how many large inputs it has, and how many get a gradient."""

    call: Callable[..., Any]
    inputs: int
    learn: int = 0
    over_logits: bool = False

    def draw(self, rows: int, columns: int) -> list[Tensor]:
        """Logits in bfloat16 and tokens, or float32 and a mask."""
        dtype = torch.bfloat16 if self.over_logits else torch.float32
        x = [torch.randn(rows, columns, device=DEVICE, dtype=dtype) for _ in range(self.inputs)]
        if self.over_logits:
            return [*x, torch.randint(columns, (rows,), device=DEVICE)]
        return [*(y.mul_(0.5) for y in x), torch.rand(rows, columns, device=DEVICE) < 0.9]


def _ppo_loss(new: Tensor, v: Tensor, old: Tensor, adv: Tensor, *rest: Tensor, impl: str) -> Any:
    return ops.ppo_loss(new, old, adv, v, *rest, impl=impl)


OPS = {
    "token_logprobs": Op(ops.token_logprobs, 1, 1, True),
    "token_logprobs_and_entropy": Op(ops.token_logprobs_and_entropy, 1, 1, True),
    "categorical_kl": Op(lambda z, r, _, impl: ops.categorical_kl(z, r, impl=impl), 2, 1, True),
    "gae": Op(ops.gae, 2),
    "ppo_advantages": Op(
        lambda x, *rest, impl: ops.ppo_advantages(x[:, 0], x, *rest, kl_coef=0.05, impl=impl), 3
    ),
    "ppo_loss": Op(_ppo_loss, 6, 2),
}


def shapes_of(op: Op) -> list[tuple[int, int]]:
    if not ON_GPU:
        return [(2, 64)]
    return [(8192, 151936), (8192, 128256)] if op.over_logits else [(512, 4096)]


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def forward(op: Op, inputs: list[Tensor], impl: str) -> list[Tensor]:
    return flat(op.call(*inputs, impl=impl))


def prepared(op: Op, inputs: list[Tensor], impl: str) -> tuple[list[Tensor], Callable[[], Any]]:
    """Return the results, and the backward pass, which may run any number of times."""
    leaves = [x.detach().requires_grad_(i < op.learn) for i, x in enumerate(inputs)]
    results = forward(op, leaves, impl)
    smooth = [y for y in results if y.requires_grad]
    seeds = [torch.ones_like(y) for y in smooth]
    backward = partial(torch.autograd.grad, smooth, leaves[: op.learn], seeds, retain_graph=True)
    return [y.detach() for y in results], backward


def check(op: Op) -> None:
    """Raise AssertionError where a result or a gradient is outside the error budget."""
    inputs = op.draw(*((16, 50257) if op.over_logits and ON_GPU else (5, 201)))
    own = [x.cpu() for x in inputs]
    double = [x.double() if x.is_floating_point() else x for x in own]
    found = []
    for impl, tensors in ((IMPL, inputs), ("reference", double), ("reference", own)):
        results, backward = prepared(op, tensors, impl)
        found.append([*results, *(backward() if op.learn else ())])
    for i, (got, truth, baseline) in enumerate(zip(*found, strict=True)):
        in_float32 = i >= len(found[0]) - op.learn and not op.over_logits
        assert_within_error_budget(got, truth, baseline, tiny=1e-6 if in_float32 else None)


def milliseconds(calls: list[Callable[[], Any]], as_graph: bool) -> float:
    """Median time per call, with a cold cache."""
    for call in calls:
        call()
    if not ON_GPU:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e3
    flush = torch.empty(4 * L2_BYTES, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    if as_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in calls:
                call()
    times = []
    for _ in range(REPLAYS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for call in [graph.replay] if as_graph else calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return float(statistics.median(times))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty((1 << 30) if ON_GPU else (1 << 20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / milliseconds([partial(target.copy_, source)], as_graph=True)


def time_op(name: str, shape: tuple[int, int], bandwidth: float) -> list[dict[str, Any]]:
    op = OPS[name]
    first = op.draw(*shape)
    gradients = sum(x.nbytes for x in first[: op.learn])
    moved = {"forward": sum(x.nbytes for x in (*first, *forward(op, first, IMPL)))}
    if name == "ppo_loss":  # its forward pass computes the gradients, and its backward scales them
        moved = {"forward": moved["forward"] + gradients, "backward": 2 * gradients}
    elif op.learn:
        moved["backward"] = moved["forward"] + gradients
    sets = [first, *(op.draw(*shape) for _ in range(2 * L2_BYTES // moved["forward"]))]
    return [measured(name, mode, sets, size, bandwidth) for mode, size in moved.items()]


def measured(
    name: str, mode: str, sets: list[list[Tensor]], size: int, bandwidth: float
) -> dict[str, Any]:
    """Time one mode. What a loss keeps for its gradients is made in its forward pass."""
    op, learns = OPS[name], name == "ppo_loss"
    row: dict[str, Any] = {"op": name, "mode": mode, "shape": list(sets[0][0].shape), "bytes": size}
    timings = (("device", IMPL, True), ("call", IMPL, False), ("eager", "reference", False))
    for who, impl, as_graph in timings:
        some = sets if impl == IMPL else sets[:1]
        if mode == "backward":
            calls = [prepared(op, x, impl)[1] for x in some]
        else:
            calls = [partial(prepared if learns else forward, op, x, impl) for x in some]
        row[f"{who}_ms"] = round(milliseconds(calls, as_graph), 5)
    row["floor_ms"] = round(size / bandwidth * 1e3, 5)
    row["of_copy"] = round(row["floor_ms"] / row["device_ms"], 3)
    return row


def output_of(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return ""


def provenance() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else f"{platform.machine()} CPU",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": os.environ.get("COMMIT") or output_of("git", "rev-parse", "HEAD"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "impl": IMPL,
    }


def report() -> dict[str, Any]:
    bandwidth, results = copy_bandwidth(), []
    print(f"{provenance()}\ncopy: {bandwidth / 1e12:.3f} TB/s; times in ms")
    columns = ("device_ms", "call_ms", "eager_ms", "floor_ms")
    print(f"{'op':28}{'mode':10}{'shape':>16}{''.join(f'{c:>11}' for c in columns)}  of copy")
    for name, op in OPS.items():
        for row in (row for shape in shapes_of(op) for row in time_op(name, shape, bandwidth)):
            results.append(row)
            numbers = "".join(f"{row[c]:11.4f}" for c in columns)
            print(f"{name:28}{row['mode']:10}{row['shape']!s:>16}{numbers}{row['of_copy']:9.0%}")
    return {**provenance(), "copy_bytes_per_second": bandwidth, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    file = parser.parse_args().json
    torch.manual_seed(0)
    for name, op in OPS.items():
        try:
            check(op)
        except AssertionError as error:
            print(f"WRONG {name}: {error}")
            sys.exit(1)
    found = report()
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    # The default stream cannot be captured, and a backward pass runs on its forward's stream.
    with torch.cuda.stream(torch.cuda.Stream() if ON_GPU else None):  # type: ignore[no-untyped-call]
        main()
