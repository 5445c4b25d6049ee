"""The script for a machine with a GPU, on one without: it must not rot in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "benchmarks" / "quick.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run in full size")
pytest.importorskip("triton", reason="the report names its version")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run with this Python, in this process's mode: interpreted, or PyTorch alone."""
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


def test_the_script_for_a_gpu_runs_without_one(tmp_path: Path) -> None:
    done = run(str(ROOT / "benchmarks" / "gpu_check.sh"), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in (tmp_path / "gpu_tests.txt").read_text()
    report = json.loads((tmp_path / "quick.json").read_text())
    assert report["commit"]
    assert len(report["results"]) == 10
    for row in report["results"]:
        assert row["of_copy"] == pytest.approx(row["floor_ms"] / row["device_ms"], abs=0.01)


def test_the_interpreted_kernels_pass_the_same_check(tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 before pytest starts")
    done = run(sys.executable, QUICK, "--json", str(tmp_path / "quick.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "quick.json").read_text())["impl"] == "triton"


def test_the_tests_for_a_gpu_pass_where_the_interpreter_can_run_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 before pytest starts")
    monkeypatch.setenv("GPU_TESTS_ON", "cpu")
    some = ("tests/kernels/test_gpu.py", "-k", "31-dtype1 or tokens and -3] or bits or compiled")
    done = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *some)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_wrong_result_ends_it_before_anything_is_timed() -> None:
    code = (
        "import runpy, ppo_kernels.reference as r; f = r.gae\n"
        "r.gae = lambda *x, **k: tuple(1.01 * y for y in f(*x, **k))\n"
        f"runpy.run_path({QUICK!r}, run_name='__main__')"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert "WRONG gae: error over the budget" in done.stdout
    assert "copy:" not in done.stdout
