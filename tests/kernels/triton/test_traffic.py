"""Bytes and launches of every operator, counted in the interpreter at real row lengths."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "traffic.py"

LAUNCHES = {
    ("token_logprobs", "forward"): ["forward_kernel"],
    ("token_logprobs", "backward"): ["backward_kernel"],
    ("token_logprobs_and_entropy", "forward"): ["forward_kernel"],
    ("token_logprobs_and_entropy", "backward"): ["backward_kernel"],
    ("categorical_kl", "forward"): ["forward_pair_kernel"],
    ("categorical_kl", "backward"): ["backward_kernel"],
    ("token_statistics", "forward"): ["forward_pair_kernel"],
    ("token_statistics", "backward"): ["backward_kernel"],
    ("gae", "forward"): ["gae_kernel"],
    ("ppo_advantages", "forward"): ["ppo_advantages_kernel"],
    ("policy_loss", "forward"): ["clipped_losses_kernel"],
    ("policy_loss", "backward"): ["mul", "mul"],
    ("value_loss", "forward"): ["clipped_losses_kernel"],
    ("value_loss", "backward"): ["mul", "mul"],
    ("ppo_loss", "forward"): ["clipped_losses_kernel"],
    ("ppo_loss", "backward"): ["mul", "mul"],
    ("masked_moments", "forward"): ["moments_kernel"],
    ("kl_penalty", "forward"): ["kl_penalty_kernel"],
    ("kl_penalty", "backward"): ["kl_penalty_kernel"],
    ("token_rewards", "forward"): ["token_rewards_kernel"],
}
"""A loss's backward pass scales both stored gradients at once, by a scalar that takes the other."""


@pytest.fixture(scope="module")
def traffic() -> ModuleType:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1 before pytest starts")
    spec = importlib.util.spec_from_file_location("benchmark_of_traffic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(traffic: ModuleType, name: str, *shape: object) -> list:
    torch.use_deterministic_algorithms(False)  # filling fresh memory with NaN is traffic as well
    case = traffic.CASES[name]
    return traffic.measure(name, case.call, case.inputs(*shape), case.learn)


def check(row) -> None:
    assert row.ratio <= 1.02, row
    assert row.loaded + row.stored >= row.floor - 4 * row.shape[0], row  # the counter counts
    assert row.launches == LAUNCHES[row.op, row.mode]


@pytest.mark.parametrize("columns", [50257, 151936])
@pytest.mark.parametrize(
    "name", ["token_logprobs", "token_logprobs_and_entropy", "categorical_kl", "token_statistics"]
)
def test_operators_over_logits_read_them_once(traffic, name, columns) -> None:
    for row in rows_of(traffic, name, 2, columns, torch.bfloat16):
        check(row)


@pytest.mark.parametrize("name", ["gae", "ppo_advantages"])
def test_scans_read_each_token_once(traffic, name) -> None:
    for row in rows_of(traffic, name, 2, 1024):
        check(row)


@pytest.mark.parametrize(
    "name",
    ["policy_loss", "value_loss", "ppo_loss", "masked_moments", "kl_penalty", "token_rewards"],
)
@pytest.mark.parametrize("length", [512, 4096])
def test_operators_over_tokens_read_each_once(traffic, name, length) -> None:
    for row in rows_of(traffic, name, 4, length):
        check(row)


@pytest.mark.parametrize(("length", "passes"), [(2048, 1), (4096, 2)])
def test_whitening_takes_a_second_pass_only_where_one_program_cannot_hold_all(
    traffic, length, passes
) -> None:
    (row,) = rows_of(traffic, "whiten", 4, length)
    x, mask = 4 * 4 * length, 4 * length
    assert row.loaded == pytest.approx(passes * (x + mask), rel=0.01)
    assert row.stored == pytest.approx(x, rel=0.01)
    assert row.launches == ["moments_kernel", "whiten_kernel"][-passes:]


def test_masked_lanes_are_not_counted_and_a_hidden_copy_is(traffic) -> None:
    """Rows of 33 tokens: by hand 9 bytes in and 8 out for each, and 12 more for a copy."""
    x, mask = torch.randn(3, 33), torch.ones(3, 33, dtype=torch.bool)
    torch.use_deterministic_algorithms(False)
    with traffic.counted() as seen:
        traffic.ops.gae(x, x, mask, impl="triton")
    assert (seen.loaded, seen.stored) == (9 * 99, 8 * 99)
    with traffic.counted() as seen:
        traffic.ops.gae(x * 2, x, mask, impl="triton")
    assert (seen.loaded, seen.stored) == (13 * 99, 12 * 99)
    assert seen.launches == ["mul", "gae_kernel"]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    command = [sys.executable, str(SCRIPT), "--op", "masked_moments", "--json", str(file)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1.008" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["shape"] for row in rows] == [[4, 512], [4, 1024], [4, 4096]]
