"""The benchmarks run, and refuse to time what is wrong."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = str(Path(__file__).parents[1] / "benchmarks" / "run.py")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would run in full size")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)


def test_an_operator_is_measured_and_written(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("r.json", "r.csv", "plots", "traces")}
    flags = zip(("--json", "--csv", "--plot", "--profile"), map(str, files.values()), strict=True)
    some = ("--op", "gae", "whiten", "--quick", "--peers")
    done = run(RUN, *some, *(word for flag in flags for word in flag))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(files["r.json"].read_text())
    assert report["copy_bytes_per_second"] > 0
    rows = {(row["op"], row["who"]): row for row in report["results"]}
    assert {"ours (torch)", "eager", "compile", "loop", "verl", "torchrl"} == {
        who for op, who in rows if op == "gae"
    }
    ours, loop = rows["gae", "ours (torch)"], rows["gae", "loop"]
    # rewards, values, mask; advantages and returns, all [64,256]
    assert ours["floor_bytes"] == 64 * 256 * (4 + 4 + 1 + 4 + 4)
    assert loop["times_ours"] == pytest.approx(loop["seconds"] / ours["seconds"])
    assert ours["of_limit"] == pytest.approx(ours["floor_seconds"] / ours["seconds"])
    with files["r.csv"].open() as file:
        assert len(list(csv.DictReader(file))) == len(report["results"])
    assert {path.name for path in files["plots"].iterdir()} == {"gae-fwd.png", "whiten-fwd.png"}
    assert {path.name for path in files["traces"].iterdir()} == {"gae.json", "whiten.json"}


def test_a_wrong_result_ends_it_before_anything_is_timed() -> None:
    code = (
        "import sys, runpy, ppo_kernels as o; f = o.whiten\n"
        "o.whiten = lambda *x, **k: 1.01 * f(*x, **k)\n"
        "sys.argv = ['run.py', '--op', 'whiten', '--quick']\n"
        f"runpy.run_path({RUN!r}, run_name='__main__')"
    )
    done = run("-c", code)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG whiten (torch): error over the budget" in done.stdout
    assert "copy" not in done.stdout
