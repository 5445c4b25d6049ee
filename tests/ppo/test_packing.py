"""Rows without padding, layers computed again, micro-batches by tokens: the numbers stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo.adapters import ACTOR, CRITIC, activate, add_adapters
from ppo.batch import Rollout, join, split
from ppo.config import InputError, PPOConfig, parse_args
from ppo.heads import decoder
from ppo.models import load_models
from ppo.packing import pack
from ppo.policy import Policy
from ppo.recompute import recompute_layers
from ppo.rollout import Sampling, generate
from ppo.train import main
from tests.ppo.test_policy import FAMILIES, agree, batch, make
from tests.ppo.test_update import make_batch, make_critic, run

HOW = {"temperature": 1.0, "impl": "torch"}
PADDED = {  # why some families keep their padding
    "falcon": "it does not run packed",
    "gemma2": "its attention is 'eager', not sdpa",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_without_padding(family: str) -> None:
    policy = Policy(make(family))
    why = policy.pack()
    assert (why or "").startswith(PADDED.get(family, "")), why
    assert policy.packed == (family not in PADDED)
    attention = decoder(policy.model).config._attn_implementation
    assert (attention == "ppo_packed") == policy.packed
    agree(policy.model, policy)  # the model itself is run with padding


def test_a_sliding_window_is_kept() -> None:
    model = make("mistral")
    model.config.sliding_window = 3
    policy = Policy(model)
    assert policy.pack() is None
    agree(model, policy)
    wide = Policy(make("mistral"))
    with torch.no_grad():
        narrow, all_ = (each(*batch(), **HOW).logprobs for each in (policy, wide))
    assert (narrow - all_).abs().max() > 1e-3


def test_no_token_sees_another_sequence_and_no_padding_is_computed(llama: PreTrainedModel) -> None:
    policy = Policy(llama)
    assert policy.pack() is None
    seen: list[torch.Size] = []
    decoder(llama).layers[0].register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    prompts, prompt_mask, responses, mask = batch()
    first = policy(prompts, prompt_mask, responses, mask, **HOW).logprobs
    assert seen == [(1, int(prompt_mask.sum() + mask.sum()), 32)]
    changed = responses.clone()
    changed[0] = responses[0] + 1
    again = policy(prompts, prompt_mask, changed, mask, **HOW).logprobs
    torch.testing.assert_close(first[1:], again[1:], atol=0, rtol=0)


def test_values_agree_without_padding(llama: PreTrainedModel) -> None:
    critic = make_critic(llama)
    tokens = batch()
    before = critic(*tokens)
    assert critic.pack() is None
    after = critic(*tokens)
    counted = torch.cat([torch.ones(3, 1, dtype=torch.bool), tokens[3]], dim=1)
    torch.testing.assert_close(before[counted], after[counted], atol=1e-5, rtol=1e-5)


def test_sampling_of_a_packed_model_is_as_before(llama: PreTrainedModel) -> None:
    prompts, prompt_mask, *_ = batch()
    sampling = Sampling(max_new_tokens=6, temperature=1.0, eos_ids=(2,), pad_id=0)
    torch.manual_seed(0)
    before = generate(llama, prompts, prompt_mask, sampling)
    assert pack(llama.model) is None
    torch.manual_seed(0)
    assert torch.equal(generate(llama, prompts, prompt_mask, sampling).responses, before.responses)


def test_a_model_that_cannot_is_refused_with_the_reason() -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    assert Policy(model).pack() == "its attention is 'eager', not sdpa"

    class Odd(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    assert pack(Odd()) == "it takes no position_ids"  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_computed_again_give_the_same_gradients(family: str, packed: bool) -> None:
    model = make(family)
    model.config.attention_dropout = model.config.resid_pdrop = 0.5  # dropout must stay off
    recompute_layers(model)
    policy = Policy(model)
    if packed:
        assert policy.pack() is None
    agree(model, policy)


def saved_bytes(model: nn.Module, work: Callable[[], Any]) -> int:
    """What autograd keeps of a forward pass, weights excepted."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work()
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage()._cdata, None)
    return sum(sizes.values())


def test_layers_computed_again_keep_less() -> None:
    sizes = []
    for again in (False, True):
        model = make("llama")
        if again:
            recompute_layers(model)
        ids = torch.arange(4 * 40).view(4, 40) % 64
        sizes.append(saved_bytes(model, lambda m=model, i=ids: m.model(i)))
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_those_of_the_role_when_layers_run_again(llama: PreTrainedModel) -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = add_adapters(make("llama"), [ACTOR, CRITIC], rank=2, alpha=4.0, targets=None)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        if again:
            recompute_layers(decoder(model))
        actor = Policy(model, adapter=ACTOR)
        activate(model, ACTOR)
        actor(*batch(), **HOW).logprobs.sum().backward()
        found.append([p.grad for p in actor.trained()])
    for plain, again_ in zip(*found, strict=True):
        torch.testing.assert_close(plain, again_)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_sampling_keeps_its_cache_when_layers_are_computed_again(llama: PreTrainedModel) -> None:
    prompts, prompt_mask, *_ = batch()
    sampling = Sampling(max_new_tokens=6, temperature=1.0, eos_ids=(2,), pad_id=0)
    torch.manual_seed(0)
    before = generate(llama, prompts, prompt_mask, sampling)
    recompute_layers(llama)
    widths: list[int] = []
    hook = llama.model.layers[0].register_forward_pre_hook(
        lambda _m, args: widths.append(args[0].shape[1])
    )
    torch.manual_seed(0)
    rollout = generate(llama, prompts, prompt_mask, sampling)
    hook.remove()
    assert widths == [4, *[1] * (len(widths) - 1)]  # the prompt once, then a token at a time
    assert torch.equal(rollout.responses, before.responses)
    # and what was sampled has the log-probabilities that training sees
    logprobs = Policy(llama)(
        rollout.prompts, rollout.prompt_mask, rollout.responses, rollout.response_mask, **HOW
    ).logprobs
    past, ids, mask = None, prompts, prompt_mask.long()
    for t in range(rollout.responses.shape[1]):
        out = llama(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            past_key_values=past,
            use_cache=True,
        )
        past, ids = out.past_key_values, rollout.responses[:, t : t + 1]
        step = out.logits[:, -1].log_softmax(-1).gather(1, ids).squeeze(1)
        keep = rollout.response_mask[:, t]
        torch.testing.assert_close(step[keep], logprobs[keep, t], atol=1e-5, rtol=1e-5)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)


def ragged(rows: int) -> Rollout:
    g = torch.Generator().manual_seed(rows)
    starts = torch.randint(0, 7, (rows, 1), generator=g)
    lengths = torch.randint(1, 31, (rows, 1), generator=g)
    prompt_mask, response_mask = torch.arange(7) >= starts, torch.arange(30) < lengths
    prompts, responses = torch.ones_like(prompt_mask).long(), torch.ones_like(response_mask).long()
    return Rollout(prompts, prompt_mask, responses, response_mask, torch.ones(rows) > 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 23])
def test_micro_batches_hold_so_many_tokens_and_every_row_once(rows: int, packed: bool) -> None:
    rollout = ragged(rows)
    lengths = rollout.attention_mask.sum(1)
    parts = list(split(rollout, 5, 64, packed=packed))
    for index, part in parts:
        assert torch.equal(part.attention_mask.sum(1), lengths[index])
        assert (part.attention_mask.sum() if packed else part.attention_mask.numel()) <= 64
        assert part.prompt_mask.any(0).all()
        assert part.response_mask.any(0).all()
    assert sorted(torch.cat([index for index, _ in parts]).tolist()) == list(range(rows))
    joined = join([(index, part.response_mask.long()) for index, part in parts], 30)
    assert torch.equal(joined, rollout.response_mask.long())
    if rows == 23:
        cost = sum(part.attention_mask.numel() for _, part in parts)
        assert cost < 0.8 * rollout.attention_mask.numel()


def test_steps_do_not_depend_on_how_minibatches_are_cut(llama: PreTrainedModel) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"micro_batch_size": 5},  # in two
        {"micro_batch_size": 2},  # in five
        {"micro_batch_size": 1},
        {"micro_batch_tokens": 12},
        {"micro_batch_tokens": 12, "packed": True},
        {"packed": True},
    ]
    ends = []
    for way in ways:
        actor = make("llama")
        critic = make_critic(actor)
        rows = make_batch(actor, rows=10)
        packed = bool(way.pop("packed", False))
        ppo = PPOConfig(ppo_epochs=2, num_minibatches=1, **way)
        run(actor, critic, rows, ppo, packed=packed)
        ends.append([*actor.parameters(), *critic.parameters()])
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_a_run_without_padding_has_the_same_metrics(
    folders: dict[str, str], tmp_path: Path
) -> None:
    common = {
        **folders,
        "steps": 2,
        "rollout.batch_size": 4,
        "rollout.max_prompt_tokens": 8,
        "rollout.max_new_tokens": 6,
        "threads": 1,
    }
    less = {
        "models.packing": "true",
        "models.gradient_checkpointing": "true",
        "ppo.micro_batch_tokens": 14,
    }
    found = []
    for name, extra in (("plain", {}), ("packed", less)):
        flags = {**common, **extra, "output_dir": str(tmp_path / name)}
        assert main([f"--{key}={value}" for key, value in flags.items()]) == 0
        (run_dir,) = (tmp_path / name).iterdir()
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
        saved = json.loads((run_dir / "actor" / "config.json").read_text())
        assert "ppo_packed" not in str(saved)
    for plain, packed in zip(*found, strict=True):
        for key, value in plain.items():
            if not key.startswith(("time/", "perf/")):
                assert packed[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"ppo.micro_batch_tokens": 10},
            (
                "ppo.micro_batch_tokens must hold the longest sequence, 560 tokens "
                "(rollout.max_prompt_tokens + rollout.max_new_tokens), got 10"
            ),
        ),
        (
            {"ppo.micro_batch_tokens": 1000, "ppo.micro_batch_size": 2},
            "ppo.micro_batch_tokens and ppo.micro_batch_size: give one of them",
        ),
    ],
)
def test_settings_that_cannot_hold_are_refused(flags: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_args([f"--{key}={value}" for key, value in flags.items()])
    assert str(caught.value) == message


def test_a_run_that_cannot_pack_says_so_before_it_starts(folders: dict[str, str]) -> None:
    file = Path(folders["actor"]) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "eager"}))
    flags = {**folders, "models.packing": "true"}
    config = parse_args([f"--{key}={value}" for key, value in flags.items()])
    with pytest.raises(InputError, match="packing: the actor cannot do without padding"):
        load_models(config)
