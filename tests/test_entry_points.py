"""The commands of the README, as subprocesses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd
    )


def test_help_shows_every_field_with_type_default_and_meaning() -> None:
    done = python("-m", "ppo.train", "--help")
    assert done.returncode == 0, done.stderr
    for flag in ("--actor", "--ppo.cliprange", "--rollout.max_new_tokens", "--optim.actor_lr"):
        assert flag in done.stdout
    assert "0.2" in done.stdout


def test_the_printed_config_is_accepted_again(tmp_path: Path) -> None:
    printed = python("-m", "ppo.train", "--ppo.cliprange", "0.1", "--print-config")
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["ppo"]["cliprange"] == 0.1
    (tmp_path / "config.yaml").write_text(printed.stdout)
    again = python("-m", "ppo.train", "--config", str(tmp_path / "config.yaml"), "--print-config")
    assert again.stdout == printed.stdout


@pytest.mark.parametrize("flag", ["--nonsense", "--ppo.lam=0.9"])
def test_an_unknown_flag_is_one_line_and_exit_code_2(flag: str) -> None:
    done = python("-m", "ppo.train", flag)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")


def test_an_op_runs_in_a_fresh_process() -> None:
    code = (
        "import torch, ppo_kernels.gae as _; import ppo_kernels\n"
        "a, r = ppo_kernels.gae(torch.tensor([[0., 1.]]), torch.zeros(1, 2))\n"
        "print(a.tolist())"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("[[0.949")
