"""Compile kernels for a named GPU without one, and read what the assembler made of them.

Every kernel file exposes ``compile_specs() -> list[CompileSpec]``: one entry for each configuration
that its launcher can choose. ``compile_for(spec, target)`` compiles one and reports registers,
spills, the width of loads and stores, and double-precision instructions. No driver is needed, but
kernels must be real: run this in a process that does not set ``TRITON_INTERPRET``.

    from ppo_kernels._triton._compile import TARGETS, compile_for
    from ppo_kernels._triton import logits

    for spec in logits.compile_specs():
        report = compile_for(spec, TARGETS["sm_90"])
        assert report.spills == 0 and report.local == 0 and report.f64 == 0
        assert report.ldg128 > 0 or not spec.streaming_loads

A spec names parameters, so that it survives a reordering of the kernel's arguments:

    CompileSpec(
        kernel=_scale_kernel,
        signature={"x_ptr": "*bf16", "n": "i32", "factor": "fp32"},
        constexprs={"BLOCK": 1024, "optional_ptr": None},  # an absent pointer is the constant None
        attrs={"x_ptr": 16},  # what the launcher's arguments are multiples of (bytes for a pointer)
        num_warps=4,
        num_stages=1,
        label="scale bf16",
        streaming_loads=True,
    )
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class CompileSpec:
    """One configuration of one kernel, as its launcher would request it."""

    kernel: Any
    """The function under ``@triton.jit``."""
    signature: dict[str, str]
    """Type of each run-time parameter by name: "*bf16", "*i64", "*i1", "i32", "i64", "fp32"."""
    constexprs: dict[str, Any]
    """Value of each compile-time parameter by name; None for a pointer that is absent."""
    attrs: dict[str, int] = field(default_factory=dict)
    """Known divisor of run-time parameters by name (16 for an aligned pointer)."""
    num_warps: int = 4
    """Warps of 32 threads. Targets with warps of 64 get ``hip_num_warps``."""
    num_stages: int = 1
    label: str = ""
    streaming_loads: bool = True
    """True where the kernel must read its large inputs with 128-bit loads."""
    hip_num_warps: int | None = None
    """Warps of 64 threads on AMD; None means the same number as ``num_warps``."""


@dataclass(frozen=True)
class CompiledReport:
    """What the assembler made of a spec. Counts are of instructions in the text, not executed."""

    label: str
    target: str
    registers: int
    """Per thread (vector registers on AMD)."""
    stack: int
    """Bytes per thread."""
    local: int
    """Bytes of local memory per thread (private segment on AMD)."""
    shared: int
    """Bytes per program."""
    spills: int
    """Loads and stores of local memory (spilled vector and scalar registers on AMD)."""
    ldg128: int
    ldg_narrow: int
    stg128: int
    stg_narrow: int
    f64: int
    """Double-precision instructions: a Python float that leaked into the kernel."""
    exp2: int
    barriers: int
    text: str = field(repr=False)
    """The disassembly."""


def compile_for(spec: CompileSpec, target: GPUTarget) -> CompiledReport:
    """Compile ``spec`` for ``target`` and read the assembler's output.

    Raises:
        RuntimeError: the kernel was decorated for the interpreter.
    """
    if not isinstance(spec.kernel, JITFunction):
        raise RuntimeError(
            f"{spec.label}: the kernel runs in the interpreter; "
            "compile in a process that does not set TRITON_INTERPRET"
        )
    names = spec.kernel.arg_names
    signature = {n: "constexpr" if n in spec.constexprs else spec.signature[n] for n in names}
    source = ASTSource(
        spec.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in spec.constexprs.items()},
        attrs={(names.index(n),): [["tt.divisibility", d]] for n, d in spec.attrs.items()},
    )
    warps = spec.hip_num_warps if target.backend == "hip" else None
    options = {
        "num_warps": warps or spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        return _read_amdgcn(spec.label, str(target.arch), compiled.asm["amdgcn"])
    return _read_cubin(spec.label, f"sm_{target.arch}", compiled.asm["cubin"])


def _read_cubin(label: str, target: str, cubin: bytes) -> CompiledReport:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", path)
        sass = _run("nvdisasm", "-c", path)
    resources = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    loads, wide_loads = _count(r"\bLDG\.", sass), _count(r"\bLDG\.\S*128", sass)
    stores, wide_stores = _count(r"\bSTG\.", sass), _count(r"\bSTG\.\S*128", sass)
    return CompiledReport(
        label=label,
        target=target,
        registers=resources["REG"],
        stack=resources["STACK"],
        local=resources["LOCAL"],
        shared=resources["SHARED"],
        spills=_count(r"\b(?:LDL|STL)\b", sass),
        ldg128=wide_loads,
        ldg_narrow=loads - wide_loads,
        stg128=wide_stores,
        stg_narrow=stores - wide_stores,
        f64=_count(r"\b(?:D(?:ADD|MUL|FMA|SETP|MNMX)\b|[FI]2[FI]\.\S*F64|MUFU\.\S*64)", sass),
        exp2=_count(r"\bMUFU\.EX2", sass),
        barriers=_count(r"\bBAR\.", sass),
        text=sass,
    )


def _read_amdgcn(label: str, target: str, assembly: str) -> CompiledReport:
    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", assembly)
        return int(match.group(1)) if match else 0

    loads = _count(r"\b(?:global|buffer|flat)_load_", assembly)
    stores = _count(r"\b(?:global|buffer|flat)_store_", assembly)
    wide_loads = _count(r"\b(?:global|buffer|flat)_load_dwordx4", assembly)
    wide_stores = _count(r"\b(?:global|buffer|flat)_store_dwordx4", assembly)
    private = number("private_segment_fixed_size")
    return CompiledReport(
        label=label,
        target=target,
        registers=number("vgpr_count"),
        stack=private,
        local=private,
        shared=number("group_segment_fixed_size"),
        spills=number("vgpr_spill_count") + number("sgpr_spill_count"),
        ldg128=wide_loads,
        ldg_narrow=loads - wide_loads,
        stg128=wide_stores,
        stg_narrow=stores - wide_stores,
        f64=_count(r"\bv_\w+_f64\b", assembly),
        exp2=_count(r"\bv_exp_f32", assembly),
        barriers=_count(r"\bs_barrier", assembly),
        text=assembly,
    )


def _run(tool: str, *arguments: object) -> str:
    command = [str(_TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))
