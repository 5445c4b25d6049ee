"""Memory plans: against the trainer's own tensors, on paper, and against a measured peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ppo.adapters import ACTOR, add_adapters
from ppo.config import Config, ModelsConfig, PPOConfig, RolloutConfig
from ppo.models import load_models
from ppo.plan import main, make_plan, verdict
from ppo.plan_memory import (
    Machine,
    batch_of,
    full_logits,
    fused_head,
    held,
    key_value_cache,
    largest_micro_batch,
    phases,
)
from ppo.plan_models import activations, adapter_parameters, roles, shape_of
from ppo.plan_time import Speed, forward_operations
from ppo.trainer import prepare
from tests.ppo.conftest import llama_config

GB = 1e9


def config_of(folders: dict[str, str], sharing: str = "separate", **changes: Any) -> Config:
    changes = {"models": ModelsConfig(sharing=sharing), **changes}
    return Config(**folders, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharing", ["separate", "trunk", "lora"])
def test_weights_and_moments_are_the_trainer_s_to_the_byte(
    folders: dict[str, str], sharing: str, dtype: str
) -> None:
    config = config_of(folders, sharing, dtype=dtype)
    trainer = prepare(config, load_models(config))
    learners = [each for each in (trainer.actor, trainer.critic) if each]
    states, gradients = [], []
    for learner in learners:
        for parameter in learner.parameters:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        learner.optimizer.step()
        for state in learner.optimizer.state.values():
            states += [state["exp_avg"], state["exp_avg_sq"]]
    models = trainer.models
    everything = {
        parameter.untyped_storage().data_ptr(): parameter
        for module in (models.actor, models.critic, models.ref, models.reward_model)
        if module is not None
        for parameter in module.parameters()
    }
    planned = held(config, Machine(), roles(config))
    assert sum(part.parameters for part in planned) == _bytes(everything.values())
    assert sum(part.optimiser for part in planned) == _bytes(states)
    assert sum(part.gradients for part in planned) == _bytes(gradients)


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_shards_split_what_ddp_copies(folders: dict[str, str]) -> None:
    found = roles(config_of(folders))
    alone, ddp, sharded = (
        held(config_of(folders), machine, found)[0]
        for machine in (Machine(), Machine(4), Machine(4, strategy="fsdp2"))
    )
    assert ddp.parameters == alone.parameters
    assert ddp.gradients == 2 * alone.gradients  # with the buckets
    assert sharded.parameters == alone.parameters / 4
    assert sharded.optimiser == alone.optimiser / 4


def test_master_weights_are_12_bytes_beside_2(folders: dict[str, str]) -> None:
    config = config_of(folders, dtype="bfloat16")
    actor = held(config, Machine(master_weights=True), roles(config))[0]
    assert actor.parameters + actor.gradients + actor.optimiser == 16 / 2 * actor.parameters


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"]])
def test_adapters_are_counted_as_peft_makes_them(targets: list[str] | None) -> None:
    pytest.importorskip("peft")
    base = LlamaForCausalLM(llama_config(tie_word_embeddings=False))
    counted = adapter_parameters(base, 4, targets)
    joined = None if targets is None else ",".join(targets)
    model = add_adapters(base, [ACTOR], rank=4, alpha=8.0, targets=joined)
    assert counted == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_llama_layer_keeps_what_the_formula_says(folders: dict[str, str]) -> None:
    shape = shape_of("actor", folders["actor"], AutoModelForCausalLM, config_of(folders))
    rows, length = 3, 40
    found = activations(shape, rows, length, torch.float32)
    width, forward, queries, heads = 32, 48, 32, 4
    numbers = 6 * width + 4 * queries + 4 * forward + heads + length + 2
    assert found.layer == rows * length * 4 * numbers
    assert found.boundary == rows * length * width * 4


def test_cache_logits_and_operations_on_paper(folders: dict[str, str]) -> None:
    shape = shape_of("actor", folders["actor"], AutoModelForCausalLM, config_of(folders))
    assert key_value_cache(shape, rows=2, length=10, size=4) == 2 * 3 * 16 * 2 * 10 * 4
    assert full_logits(5, shape, 4, backward=True, trained=False) == 5 * 64 * 12
    assert full_logits(5, shape, 2, backward=False, trained=False) == 5 * 64 * 6
    assert fused_head(5, shape, 4, backward=True, trained=True) == (5 * 64 + 5 * 32 + 64 * 32) * 4
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    assert shape.layer_parameters == layer
    assert shape.parameters == 2 * layer + 64 * 32 + 32  # the head is tied
    attention = 2 * 2 * 32 * 10 * 20
    assert forward_operations(shape, 2, 10) == 2 * 2 * layer * 20 + attention


PEAK = """
import re, sys, torch
from transformers import AutoModelForCausalLM
from ppo.config import Config
from ppo.plan_models import activations, shape_of
torch.set_num_threads(1)
folder = sys.argv[1]
config = Config(actor=folder, prompts="x.jsonl", reward_model=folder)
shape = shape_of("actor", folder, AutoModelForCausalLM, config)
model = AutoModelForCausalLM.from_pretrained(folder).base_model
def peak():  # of this program alone: ru_maxrss begins with that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1))
def run(rows, length):
    ids = torch.ones(rows, length, dtype=torch.int64)
    model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
run(1, 8)
before = peak()
run(8, 256)
after = peak()
found = activations(shape, 8, 256, torch.float32)
print((after - before) * 1024, shape.layers * found.layer + found.rest)
"""


def test_activations_are_within_a_third_of_a_measured_peak(tmp_path: Path) -> None:
    config = llama_config(hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    config.max_position_embeddings = 256
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    measured, planned = map(int, done.stdout.split())
    assert measured / planned == pytest.approx(1.0, abs=1 / 3)


def test_checkpoints_keep_one_layer_and_the_boundaries(folders: dict[str, str]) -> None:
    config, less_kept = (
        config_of(folders, models=ModelsConfig(gradient_checkpointing=kept))
        for kept in (False, True)
    )
    found = roles(config)
    full, less = (
        next(p for p in phases(each, Machine(), found) if p.name == "update actor").working
        for each in (config, less_kept)
    )
    shape, batch = found[0].shape, batch_of(config, Machine())
    kept = activations(shape, batch.micro, batch.length, torch.float32)
    assert full - less == kept.layer - 2 * kept.boundary


def test_the_largest_micro_batch_fits_and_the_next_does_not(folders: dict[str, str]) -> None:
    config = config_of(folders, rollout=RolloutConfig(batch_size=32))
    found = roles(config)

    def peak(micro: int) -> float:
        changed = config_of(
            folders,
            rollout=RolloutConfig(batch_size=32),
            ppo=PPOConfig(micro_batch_size=micro),
        )
        return max(phase.total for phase in phases(changed, Machine(), found))

    limit = (peak(8) + peak(9)) / 2
    assert largest_micro_batch(config, Machine(gpu_memory=limit), found) == 8
    plan = make_plan(config, Machine(gpu_memory=limit))
    assert not plan.fits
    assert verdict(plan).endswith("; ppo.micro_batch_size 8 fits")


def test_no_weights_are_needed(folders: dict[str, str]) -> None:
    for name in ("actor", "reward_model"):
        for file in Path(folders[name]).iterdir():
            if file.name != "config.json":
                file.unlink()
    assert make_plan(config_of(folders)).fits


def test_more_gpus_never_take_longer_to_compute(folders: dict[str, str]) -> None:
    config = config_of(folders, rollout=RolloutConfig(batch_size=64))
    fast = Speed(node_link=1e30, net_link=1e30)
    one, many = (
        make_plan(config, Machine(gpus, strategy="fsdp2"), fast).seconds for gpus in (1, 16)
    )
    assert all(many[name] <= one[name] for name in one)
    assert many["score"] == pytest.approx(one["score"] / 16)


def test_the_command_prints_tables_and_json(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{key}={value}" for key, value in folders.items()]
    assert main([*flags, "--gpus", "8", "--strategy", "fsdp2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("predicted, not measured, on each of 8 x 80 GB, fsdp2")
    assert "reference" in text
    assert main([*flags, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["fits"] is True
    assert tree["batch"]["responses"] == 64
    assert max(sum_of(phase) for phase in tree["phases"]) == pytest.approx(tree["peak"])


def sum_of(phase: dict[str, Any]) -> float:
    return float(sum(value for name, value in phase.items() if name != "name"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "error: actor must be given: the plan is made from its config.json"),
        (["--gpus", "0"], "error: gpus must be positive, got 0"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert capsys.readouterr().err.strip() == message
