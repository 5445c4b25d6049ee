"""Every kernel in every configuration, compiled for four GPUs on a machine that has none."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton's compiler")

from ppo_kernels import _triton
from ppo_kernels._triton._compile import TARGETS, CompileSpec, compile_for

FOLDER = Path(next(iter(_triton.__path__)))
MODULES = [f"{_triton.__name__}.{module.name}" for module in pkgutil.iter_modules([str(FOLDER)])]

SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes that one program may use. CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability"; AMD CDNA3 ISA, "LDS"."""

INPUTS = {
    "forward_kernel": ["logits_ptr"],
    "forward_pair_kernel": ["logits_ptr", "ref_ptr"],
    "backward_kernel": ["logits_ptr", "ref_ptr"],
    "gae_kernel": ["rewards_ptr", "values_ptr"],
    "ppo_advantages_kernel": ["logprobs_ptr", "ref_ptr", "values_ptr"],
    "token_rewards_kernel": ["logprobs_ptr", "ref_ptr"],
    "kl_penalty_kernel": ["logprobs_ptr", "ref_ptr", "grad_ptr"],
    "moments_kernel": ["x_ptr"],
    "whiten_kernel": ["x_ptr"],
    "clipped_losses_kernel": [
        "logprobs_ptr", "old_ptr", "adv_ptr", "values_ptr", "oldv_ptr", "returns_ptr",
    ],
}  # fmt: skip
"""Large inputs of each kernel: those have to come in 128 bits at a time. Masks are narrower."""

OUTPUTS = {
    "backward_kernel": ["grad_ptr"],
    "gae_kernel": ["advantages_ptr", "returns_ptr"],
    "ppo_advantages_kernel": ["advantages_ptr", "returns_ptr"],
    "token_rewards_kernel": ["out_ptr"],
    "kl_penalty_kernel": ["out_ptr"],
    "whiten_kernel": ["out_ptr"],
    "clipped_losses_kernel": ["logprobs_grad_ptr", "values_grad_ptr"],
}


def specs() -> list[CompileSpec]:
    """Of all modules; one that only passes on another's function does not count twice."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        if hasattr(module, "compile_specs"):
            found[module.compile_specs.__module__] = module.compile_specs()
    return [spec for part in found.values() for spec in part]


SPECS = specs()


def name(spec: CompileSpec) -> str:
    return spec.kernel.__name__


def wide_accesses(spec: CompileSpec) -> tuple[int, int]:
    """How many tensors have to be read, and how many written, 128 bits at a time."""
    present = {k for k in spec.signature if k.endswith("_ptr")}
    if not spec.constexprs.get("REF_ALIGNED", True):
        present -= {"ref_ptr"}
    if not spec.constexprs.get("GRAD_ALIGNED", True):
        present -= {"grad_ptr"}
    if spec.constexprs.get("ESTIMATOR") == "k1" and "grad_ptr" in present:
        present -= {"logprobs_ptr", "ref_ptr"}  # the slope is 1
    inputs, outputs = INPUTS[name(spec)], OUTPUTS.get(name(spec), [])
    return len(present.intersection(inputs)), len(present.intersection(outputs))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "spec", SPECS, ids=[f"{i}-{name(spec)}-{spec.label}" for i, spec in enumerate(SPECS)]
)
def test_no_spills_no_float64_and_wide_accesses(spec: CompileSpec, target: str) -> None:
    report = compile_for(spec, TARGETS[target])
    assert (report.spills, report.local, report.stack) == (0, 0, 0), report
    assert report.f64 == 0, report
    assert report.shared <= SHARED_MEMORY[target], report
    reads, writes = wide_accesses(spec)
    if spec.streaming_loads:
        assert report.ldg128 >= reads, report
        assert report.stg128 >= writes, report


def test_the_report_is_read_from_the_assembler() -> None:
    """Zeros must be figures, not what a pattern that matches nothing gives."""
    spec = next(s for s in SPECS if name(s) == "clipped_losses_kernel" and s.streaming_loads)
    for target in ("sm_90", "gfx942"):
        report = compile_for(spec, TARGETS[target])
        assert report.registers > 16
        assert report.shared + report.barriers > 0
        assert report.ldg_narrow > 0
        assert report.exp2 > 0


def test_every_kernel_that_is_launched_has_a_spec() -> None:
    """A launch reads `kernel[grid](...)`, and nothing else in this folder does."""
    launched = {
        node.func.value.id
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    kernels = {
        node.name
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    covered = {name(spec) for spec in SPECS}
    assert covered == launched == kernels == set(INPUTS)


def test_import_needs_no_gpu() -> None:
    code = f"import importlib, torch\nfor m in {MODULES}: importlib.import_module(m)\n"
    code += "assert not torch.cuda.is_initialized()"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
