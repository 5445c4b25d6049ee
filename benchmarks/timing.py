"""Clocks, memory and the device's own limits: what every benchmark here measures with."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
Call = Callable[[], Any]
CPU_CACHE_BYTES = 64 << 20
"""Written before each cold call on a CPU; larger than the last-level cache that one core sees."""


class Times(NamedTuple):
    """Seconds of one call."""

    median: float
    p20: float
    p80: float


def quantiles(seconds: Sequence[float]) -> Times:
    """Median, 20th and 80th percentile."""
    if len(seconds) == 1:
        return Times(*[seconds[0]] * 3)
    fifths = statistics.quantiles(seconds, n=5, method="inclusive")
    return Times(statistics.median(seconds), fifths[0], fifths[-1])


class Clock:
    """Times calls on a device.

    Args:
        device: "cpu" or "cuda".
        cold: whether the cache is overwritten before each call.
        budget: seconds to spend on one measurement, at least three calls.
        most: calls of one measurement at most.
    """

    def __init__(
        self, device: str, *, cold: bool = True, budget: float = 1.0, most: int = 100
    ) -> None:
        self.device, self.budget, self.most = device, budget, most
        size = CPU_CACHE_BYTES
        if device == "cuda":
            size = 4 * torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(size, dtype=torch.uint8, device=device) if cold else None

    def time(self, call: Call, prepare: Callable[[], Any] = lambda: None) -> Times:
        """Time `call(prepare())`; only the call is on the clock. The first one warms up."""
        run = self._cuda if self.device == "cuda" else self._cpu
        run(call, prepare)
        seconds: list[float] = []
        start = time.perf_counter()
        while len(seconds) < 3 or (
            len(seconds) < self.most and time.perf_counter() - start < self.budget
        ):
            seconds.append(run(call, prepare))
        return quantiles(seconds)

    def _cpu(self, call: Any, prepare: Any) -> float:
        ready = prepare()
        if self.flush is not None:
            self.flush.zero_()
        start = time.perf_counter()
        result = call(ready)
        seconds = time.perf_counter() - start
        del result
        return seconds

    def _cuda(self, call: Any, prepare: Any) -> float:
        ready = prepare()
        if self.flush is not None:
            self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # keeps the device busy while the host enqueues, so that its own time is not measured
        torch.cuda._sleep(1_000_000)
        begin.record()
        result = call(ready)
        end.record()
        end.synchronize()
        del result
        return float(begin.elapsed_time(end)) / 1e3


def copy_bandwidth(clock: Clock) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(
        (2 << 30) if clock.device == "cuda" else (256 << 20),
        dtype=torch.uint8,
        device=clock.device,
    ).zero_()
    target = torch.empty_like(source).zero_()
    return 2 * source.nbytes / clock.time(lambda _: target.copy_(source)).median


def matmul_rate(clock: Clock, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matmul."""
    n = 8192 if clock.device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=clock.device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / clock.time(lambda _: a @ b).median


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_memory(call: Call, device: str) -> int | None:
    """Bytes beyond what is held before the call; None where the system does not tell.

    On a GPU the allocator's peak; on Linux the high-water mark of the resident set.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)  # what a warm-up left would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def launches(call: Call, device: str) -> int | None:
    """Kernels that a call launches on a GPU; None elsewhere (see `run.py --static`)."""
    if device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if event.device_type.name == "CUDA")


def output_of(*command: str) -> str:
    """What a command prints; empty where it fails."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
    return ""


def cpu_name() -> str:
    """The processor, as the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def provenance(device: str) -> dict[str, Any]:
    """Device, driver, versions and commit: what a figure is worth nothing without."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or output_of("git", "rev-parse", "HEAD"),
        "modified": bool(output_of("git", "status", "--porcelain", "--", "ppo_kernels", "ppo")),
    }
