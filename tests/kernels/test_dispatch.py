"""Which implementation runs."""

import os
import subprocess
import sys

import pytest
import torch

from ppo_kernels import gae, token_logprobs
from ppo_kernels._dispatch import Impl, resolve_impl

CPU = torch.zeros(1)


class OnGPU:
    """A tensor's device and dtype, on a machine without one."""

    def __init__(self, kind="cuda", dtype=torch.float32):
        self.device, self.dtype = torch.device(kind), dtype


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_auto():
    assert resolve_impl("auto", CPU) is Impl.TORCH
    assert resolve_impl("auto", None, CPU) is Impl.TORCH
    for kind in ("cuda", "xpu"):
        assert resolve_impl("auto", OnGPU(kind)) is Impl.TRITON
    assert resolve_impl("auto", OnGPU("mps")) is Impl.TORCH
    assert resolve_impl("auto", OnGPU(dtype=torch.float64)) is Impl.TORCH
    assert resolve_impl("auto", OnGPU(), OnGPU(dtype=torch.float64)) is Impl.TORCH


def test_auto_stays_on_torch_under_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_impl("auto", CPU) is Impl.TORCH
    assert resolve_impl("triton", CPU) is Impl.TRITON


@pytest.mark.parametrize("impl", ["triton", "torch", "reference"])
def test_a_name_is_taken_literally(impl):
    assert resolve_impl(impl, OnGPU()) is Impl(impl)


def test_auto_without_triton_on_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr("ppo_kernels._dispatch._HAS_TRITON", False)
    with pytest.warns(RuntimeWarning, match="because triton is not installed"):
        assert resolve_impl("auto", OnGPU()) is Impl.TORCH
    assert resolve_impl("auto", CPU) is Impl.TORCH
    with pytest.raises(ModuleNotFoundError, match="impl='triton' needs the triton package"):
        resolve_impl("triton", OnGPU())


def test_triton_on_the_cpu_is_refused_with_the_ways_out(no_interpreter):
    with pytest.raises(ValueError, match="cannot run on cpu tensors") as caught:
        gae(torch.zeros(1, 2), torch.zeros(1, 2), impl="triton")
    for way_out in ("GPU", "TRITON_INTERPRET=1", "impl='torch'"):
        assert way_out in str(caught.value)


def test_triton_refuses_float64():
    with pytest.raises(TypeError, match=r"takes no torch\.float64 tensors; use impl='torch'"):
        resolve_impl("triton", OnGPU(dtype=torch.float64))
    logits = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        token_logprobs(logits, torch.tensor([0]), impl="triton")


def test_unknown_name():
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'triton', .* got 'fast'"):
        resolve_impl("fast", CPU)


BLOCKED = """
import sys
sys.modules["triton"] = None  # every import of it fails from here on
import torch, ppo_kernels
x = torch.zeros(1, 3)
ppo_kernels.gae(x, x)
ppo_kernels.token_logprobs(x, torch.tensor([1]))
try:
    ppo_kernels.gae(x, x, impl="triton")
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_works_with_triton_blocked():
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True, env=os.environ
    )
    assert run.stdout == "triton\n"
