"""Measure peak memory and time of the way from hidden states to log-probabilities and back.

    python benchmarks/linear_memory.py [--tokens 1024 ...] [--vocabularies 32000 151936]

Every case runs in a fresh process, forward and backward, float32 on a CPU and bfloat16 on a GPU.
Memory is the peak above what inputs and libraries hold before the call: on Linux the high-water
mark of the resident set, which is reset after a warm-up; on a GPU that of the allocator. Gradients
count, because they are part of the answer. Times are medians; those of the processor alone say
more where other programs run. A case that would need more than
half of the free memory is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.linear_ppo_loss import linear_ppo_loss
from ppo_kernels.linear_token_logprobs import linear_token_logprobs

ROOT = Path(__file__).parents[1]
MAX_REPEATS, MIN_SECONDS = 5, 4.0
FULL_COPIES = 3
"""Logits, their log-softmax and its gradient are alive at once in the full form."""


def full_logits(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Logits as a model returns them, then log π(a)."""
    logp = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    return logp.gather(1, tokens[:, None]).squeeze(1)


def step_of(name: str, x: dict[str, Tensor]) -> Callable[[], Any]:
    """Return forward and backward of a case, with the same incoming gradient for all."""
    hidden, weight, tokens = x["hidden"], x["weight"], x["tokens"]
    if name == "linear_ppo_loss":
        mask = torch.ones_like(tokens, dtype=torch.bool)
        constants = (x["old_logprobs"], x["advantages"], mask)
        return lambda: linear_ppo_loss(hidden, weight, tokens, *constants).loss.backward()
    if name == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return lambda: loss(weight, hidden, tokens).backward()
    if name == "cut_cross_entropy":
        from cut_cross_entropy import linear_cross_entropy

        return lambda: linear_cross_entropy(hidden, weight, tokens, reduction="none").backward(
            -x["advantages"]
        )
    operator = linear_token_logprobs if name == "linear_token_logprobs" else full_logits
    if name == "full compiled":
        operator = torch.compile(full_logits, dynamic=False)
    return lambda: operator(hidden, weight, tokens).backward(x["advantages"])


NEEDS = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
CASES = ["full", "full compiled", *NEEDS, "linear_token_logprobs", "linear_ppo_loss"]


def inputs(n: int, v: int, d: int, device: str) -> dict[str, Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options: dict[str, Any] = {"device": device}
    return {
        "hidden": torch.randn(n, d, dtype=dtype, **options).requires_grad_(),
        "weight": (torch.randn(v, d, dtype=dtype, **options) * d**-0.5).requires_grad_(),
        "tokens": torch.randint(v, (n,), **options),
        "advantages": torch.randn(n, **options),
        "old_logprobs": torch.randn(n, **options) * 0.1 - 11,
    }


def status(field: str) -> int:
    """A number of bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_of(step: Callable[[], Any], device: str) -> int:
    """Peak memory of a step beyond what is held before it."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # or what the warm-up has left would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def run_case(name: str, n: int, v: int, d: int, device: str) -> dict[str, Any]:
    """Measure in this process."""
    torch.manual_seed(0)
    x = inputs(n, v, d, device)
    leaves, step = (x["hidden"], x["weight"]), step_of(name, x)

    def fresh() -> None:
        for leaf in leaves:
            leaf.grad = None

    step()
    fresh()
    peak = peak_of(step, device)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    while not seconds or (sum(seconds) < MIN_SECONDS and len(seconds) < MAX_REPEATS):
        fresh()
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    return {
        "case": name, "tokens": n, "vocabulary": v, "hidden": d, "peak_bytes": peak,
        "gradient_bytes": gradients, "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds), "repeats": len(seconds),
    }  # fmt: skip


def free_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
    return int(info.split()[0]) * 1024


def in_fresh_process(name: str, n: int, v: int, d: int, device: str) -> dict[str, Any]:
    """Measure one case, or say why not."""
    row = {"case": name, "tokens": n, "vocabulary": v, "hidden": d}
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        return {**row, "skipped": f"{NEEDS[name]} is not installed"}
    if name.startswith("full") and 4 * FULL_COPIES * n * v > free_bytes(device) / 2:
        return {**row, "skipped": "more than half of the free memory"}
    case = json.dumps([name, n, v, d, device])
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {**row, "skipped": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def outcome_of(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return str(row["skipped"])
    mebibytes = row["peak_bytes"] / 2**20
    return f"{mebibytes:8.0f} MiB {row['seconds']:8.3f} s {row['cpu_seconds']:8.3f} s CPU"


def provenance(device: str) -> dict[str, Any]:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    return {
        "device": cpu if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git("rev-parse", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--", "ppo_kernels")),
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw peak memory over N, a panel per vocabulary, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in report["results"] if "peak_bytes" in r]
    vocabularies = sorted({r["vocabulary"] for r in rows})
    width = 4.6 * len(vocabularies)
    figure, panels = pyplot.subplots(1, len(vocabularies), figsize=(width, 3.8), squeeze=False)
    for panel, v in zip(panels[0], vocabularies, strict=True):
        for name in CASES:
            line = [r for r in rows if r["case"] == name and r["vocabulary"] == v]
            n, peak = [r["tokens"] for r in line], [r["peak_bytes"] / 2**20 for r in line]
            if line:
                panel.plot(n, peak, marker="o", markersize=4, label=name)
        gradients = sorted({(r["tokens"], r["gradient_bytes"] / 2**20) for r in rows
                            if r["vocabulary"] == v})  # fmt: skip
        panel.plot(*zip(*gradients, strict=True), "--", color="grey", label="the gradients alone")
        panel.set(xscale="log", yscale="log", xlabel="tokens N", title=f"V = {v}")
        ticks = [n for n, _ in gradients]
        panel.set_xticks(ticks, [str(n) for n in ticks], minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(True, which="major", alpha=0.3)
    panels[0][0].set_ylabel("peak memory of forward + backward, MiB")
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(f"hidden states to log-probabilities and back, {report['device']}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**i * 1024 for i in range(5)])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "linear_memory.png")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(*json.loads(options.case))))
        return
    report = {**provenance(options.device), "results": []}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"linear_memory-{options.device}.json"
    for v in options.vocabularies:
        for n in options.tokens:
            for name in options.cases:
                row = in_fresh_process(name, n, v, options.hidden, options.device)
                report["results"].append(row)
                print(f"V {v:6d}  N {n:6d}  {name:24s} {outcome_of(row)}", flush=True)
                path.write_text(json.dumps(report, indent=1) + "\n")
            plot(report, options.plot)


if __name__ == "__main__":
    main()
