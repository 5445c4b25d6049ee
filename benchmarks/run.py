"""Check every operator, then time it against what people would use instead.

    python benchmarks/run.py [--op NAME ...] [--impl NAME ...] [--mode fwd|bwd|full ...] [--quick]
                             [--json FILE] [--csv FILE] [--plot DIR] [--peers] [--profile DIR]
    python benchmarks/run.py --static [--op NAME ...]    # bytes and launches, on any machine

A wrong result prints WRONG and ends with exit code 1 before anything is timed. See README.md for
how to read the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from ops import OPS, Op, Shape, draw, floor_bytes, matmul_flops, tensors
from rich.console import Console
from rich.table import Table
from timing import Clock, copy_bandwidth, launches, matmul_rate, peak_memory, provenance

from ppo_kernels.testing import assert_within_error_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS = "triton" if DEVICE == "cuda" else "torch"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SMALL: dict[str, Shape] = {"logits": (7, 501), "tokens": (5, 67), "linear": (9, 301, 40)}
MODES = ("fwd", "bwd", "full")
COUNTED = [name for name, op in OPS.items() if op.kind != "linear"]
"""What traffic.py can count: the linear operators are library matmuls around kernels."""
COLUMNS = (
    "op", "shape", "mode", "who", "ms", "p20", "p80", "rate", "of limit", "floor ms", "peak MB",
    "launches", "x ours",
)  # fmt: skip


def with_gradients(op: Op, x: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The inputs with leaves where gradients go."""
    leaves = {name: x[name].detach().requires_grad_() for name in op.learn}
    return {**x, **leaves}, list(leaves.values())


def gradients(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> Any:
    """Backward from ones; only the first smooth result, which is the loss where there is one."""
    smooth = [y for y in outputs if y.requires_grad]
    seeds = [torch.ones_like(y) for y in smooth]
    return torch.autograd.grad(smooth, leaves, seeds, retain_graph=True, allow_unused=True)


def check(op: Op, f: Callable[..., Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Results and gradients within twice PyTorch's own error, on flat and peaked inputs.

    Raises:
        AssertionError: they are not.
    """
    for peaked in (False, True):
        torch.manual_seed(0)
        x = draw(op, SMALL[op.kind], DEVICE, dtype=dtype, peaked=peaked)
        own = {name: t.cpu() for name, t in x.items()}
        double = {n: t.double() if t.is_floating_point() else t for n, t in own.items()}
        found = []
        for function, inputs, settings in (
            (f, x, options),
            (op.plain, double, {}),
            (op.plain, own, {}),
        ):
            ready, leaves = with_gradients(op, inputs)
            results = tensors(op.call(ready, function, **settings))
            grads = gradients(results, leaves) if leaves else ()
            found.append([t.detach() for t in (*results, *grads)])
        for got, truth, baseline in zip(*found, strict=True):
            if truth.is_floating_point():
                # the baseline may be exact by luck where a result is a sum of few numbers
                tiny = 1e-5 * max(1.0, float(truth.nan_to_num(0, 0, 0).abs().max()))
                low = got.element_size() < 4
                assert_within_error_budget(got, truth, baseline, tiny=None if low else tiny)


def contenders(
    op: Op, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[..., Any] | str, dict[str, Any]]]:
    """(who, function or why not, settings) for each of those to be timed."""
    for impl in options.impl or [OURS]:
        yield f"ours ({impl})", op.f, {"impl": impl}
    yield "eager", op.plain, {}
    yield "compile", torch.compile(op.plain, dynamic=False), {}
    for name, function in op.others.items():
        yield name, function, {}
    if options.peers:
        for name, peer in op.peers.items():
            try:
                yield name, peer.load(), {}
            except ImportError as error:
                yield name, f"not installed ({str(error).splitlines()[0]})", {}


def measure(
    op: Op,
    f: Callable[..., Any],
    settings: dict[str, Any],
    x: dict[str, Any],
    mode: str,
    clock: Clock,
) -> dict[str, Any]:
    """Time, memory and launches of one mode."""
    ready, leaves = with_gradients(op, x)

    def forward(_: Any = None) -> list[torch.Tensor]:
        return tensors(op.call(ready, f, **settings))

    def forward_without_gradient(_: Any = None) -> list[torch.Tensor]:
        with torch.no_grad():
            return tensors(op.call(x, f, **settings))

    def full(_: Any = None) -> Any:
        return gradients(forward(), leaves)

    def backward(outputs: list[torch.Tensor]) -> Any:
        return gradients(outputs, leaves)

    def nothing() -> None:
        return None

    ways: dict[str, tuple[Any, Any]] = {
        "fwd": (forward_without_gradient, nothing),
        "bwd": (backward, forward),
        "full": (full, nothing),
    }
    call, prepare = ways[mode]
    times = clock.time(call, prepare)
    state = prepare()
    peak = peak_memory(lambda: call(state), DEVICE)
    return {
        "seconds": times.median, "p20": times.p20, "p80": times.p80, "peak_bytes": peak,
        "launches": launches(lambda: call(state), DEVICE),
    }  # fmt: skip


def modes_of(op: Op, wanted: list[str]) -> list[str]:
    """Those that mean something: no backward without gradients, none where forward has done it."""
    if not op.learn:
        return ["fwd"] if "fwd" in wanted or "full" in wanted else []
    return [mode for mode in wanted if mode != "bwd" or not op.gradient_in_forward]


def rows_of(
    name: str, options: argparse.Namespace, limits: dict[str, float], clock: Clock
) -> Iterator[dict[str, Any]]:
    """Measure an operator in all its sizes and modes, ours first."""
    op = OPS[name]
    shapes = op.shapes(DEVICE)
    for shape in shapes[:1] if options.quick else shapes:
        torch.manual_seed(0)
        x = draw(op, shape, DEVICE, dtype=DTYPE, peaked=options.inputs == "peaked")
        for mode in modes_of(op, options.mode):
            best = None
            ready, _ = with_gradients(op, x)
            floor = floor_bytes(op, ready, tensors(op.call(ready, op.f, impl=OURS)), mode)
            for who, f, settings in contenders(op, options):
                row: dict[str, Any] = {"op": name, "shape": list(shape), "mode": mode, "who": who}
                if isinstance(f, str):
                    yield {**row, "skipped": f}
                    continue
                try:
                    row |= measure(op, f, settings, x, mode, clock)
                except Exception as error:  # another package's function, or memory
                    yield {**row, "skipped": (str(error) or type(error).__name__).splitlines()[0]}
                    continue
                flops = matmul_flops(op, shape, mode)
                row["floor_bytes"], row["flops"] = floor, flops
                least = max(floor / limits["copy"], (flops or 0) / limits["matmul"])
                row["floor_seconds"] = least
                row["of_limit"] = least / row["seconds"]
                best = best or row["seconds"]
                row["times_ours"] = row["seconds"] / best
                yield row


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the table shows it."""
    head = [row["op"], " x ".join(map(str, row["shape"])), row["mode"], row["who"]]
    if "skipped" in row:
        return [*head, row["skipped"], *[""] * (len(COLUMNS) - 5)]
    seconds = row["seconds"]
    rate = (
        f"{row['flops'] / seconds / 1e12:.3g} TF/s"
        if row["flops"]
        else f"{row['floor_bytes'] / seconds / 1e9:.3g} GB/s"
    )
    peak, count = row["peak_bytes"], row["launches"]
    return [
        *head,
        *(f"{1e3 * value:.4g}" for value in (seconds, row["p20"], row["p80"])),
        rate,
        f"{row['of_limit']:.0%}",
        f"{1e3 * row['floor_seconds']:.4g}",
        "" if peak is None else f"{peak / 1e6:.4g}",
        "" if count is None else str(count),
        f"{row['times_ours']:.2f}",
    ]


def show(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    """Print one operator's rows."""
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        left = name in ("op", "shape", "mode", "who")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "who")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=max(console.width, 150)).print(table) if console.width < 150 else console.print(
        table
    )


def plot(report: dict[str, Any], folder: Path) -> None:
    """Log-log plots of time over size, one file for each operator and mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in report["results"] if "seconds" in row]
    for name, mode in sorted({(row["op"], row["mode"]) for row in rows}):
        figure, axis = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
        some = [row for row in rows if (row["op"], row["mode"]) == (name, mode)]
        for who in dict.fromkeys(row["who"] for row in some):
            line = sorted(
                (row["floor_bytes"] / 1e6, row["seconds"] * 1e3)
                for row in some
                if row["who"] == who
            )
            axis.plot(*zip(*line, strict=True), marker="o", markersize=4, label=who)
        floor = sorted({(row["floor_bytes"] / 1e6, row["floor_seconds"] * 1e3) for row in some})
        axis.plot(*zip(*floor, strict=True), "--", color="grey", label="floor")
        axis.set(xscale="log", yscale="log", xlabel="MB that must move", ylabel="ms")
        axis.set_title(f"{name}, {mode}, {report['device']}", fontsize=9)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
        figure.savefig(folder / f"{name}-{mode}.png", dpi=120)
        pyplot.close(figure)


def profile(names: list[str], folder: Path) -> None:
    """Write a trace of forward and backward for each operator; open it in Perfetto."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    folder.mkdir(parents=True, exist_ok=True)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    for name in names:
        op = OPS[name]
        x = draw(op, op.shapes(DEVICE)[0], DEVICE, dtype=DTYPE, peaked=False)
        with record(activities=kinds) as found:
            ready, leaves = with_gradients(op, x)
            results = tensors(op.call(ready, op.f, impl=OURS))
            if leaves:
                gradients(results, leaves)
        found.export_chrome_trace(str(folder / f"{name}.json"))


def write_csv(report: dict[str, Any], path: Path) -> None:
    """One line for each measurement."""
    keys = list(dict.fromkeys(key for row in report["results"] for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["device", "commit", *keys])
        writer.writeheader()
        for row in report["results"]:
            shape = "x".join(map(str, row["shape"]))
            writer.writerow(
                {**row, "shape": shape, "device": report["device"], "commit": report["commit"]}
            )


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--op", nargs="+", choices=OPS, default=list(OPS), metavar="NAME")
    add("--impl", nargs="+", choices=["triton", "torch"], help="default: this device's")
    add("--mode", nargs="+", choices=MODES, default=list(MODES))
    add("--inputs", choices=["randn", "peaked"], default="randn", help="kind of logits")
    add("--cache", choices=["cold", "hot"], default="cold")
    add("--quick", action="store_true", help="the smallest size, less time on each")
    add("--peers", action="store_true", help="time other packages, where installed")
    add("--static", action="store_true", help="bytes and launches, counted; nothing is timed")
    add("--json", type=Path, metavar="FILE")
    add("--csv", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="DIR")
    add("--profile", type=Path, metavar="DIR", help="write a trace of each operator")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    if options.static:  # in a process of its own: kernels are interpreted there
        command = [sys.executable, str(Path(__file__).with_name("traffic.py"))]
        counted = [name for name in options.op if name in COUNTED]
        command += ["--op", *counted, *(["--json", str(options.json)] if options.json else [])]
        return subprocess.run(command).returncode
    console = Console()
    for name in options.op:
        for impl in options.impl or [OURS]:
            try:
                check(OPS[name], OPS[name].f, {"impl": impl}, DTYPE)
            except AssertionError as error:
                print(f"WRONG {name} ({impl}): {error}")
                return 1
    clock = Clock(DEVICE, cold=options.cache == "cold", budget=0.2 if options.quick else 1.0)
    limits = {"copy": copy_bandwidth(clock), "matmul": matmul_rate(clock, DTYPE)}
    report: dict[str, Any] = {
        **provenance(DEVICE), "dtype": str(DTYPE).removeprefix("torch."), "inputs": options.inputs,
        "cache": options.cache, "copy_bytes_per_second": limits["copy"],
        "matmul_flops": limits["matmul"], "results": [],
    }  # fmt: skip
    console.print(
        f"{report['device']}, torch {report['torch']}, {report['dtype']}, {report['cache']} cache: "
        f"copy {limits['copy'] / 1e9:.4g} GB/s, matmul {limits['matmul'] / 1e12:.4g} TFLOP/s"
    )
    if DEVICE == "cpu":
        console.print(
            "CPU figures of the lean PyTorch implementation, on small sizes: no GPU was found"
        )
    console.print("An operator alone, not a PPO step: for its share of a step see end_to_end.py")
    for name in options.op:
        rows = list(rows_of(name, options, limits, clock))
        report["results"] += rows
        show(console, rows, name)
        if options.json:  # what is done is kept
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.csv:
        write_csv(report, options.csv)
    if options.plot:
        plot(report, options.plot)
    if options.profile:
        profile(options.op, options.profile)
    return 0


if __name__ == "__main__":
    # On a stream of its own: a backward pass runs on its forward's stream.
    with torch.cuda.stream(torch.cuda.Stream() if DEVICE == "cuda" else None):
        sys.exit(main())
