"""One base for several roles: what each role moves, and what stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo.adapters import ACTOR, CRITIC, REFERENCE, activate, add_adapters, role_parameters
from ppo.config import parse_args
from ppo.data import encode_prompts
from ppo.models import load_models
from ppo.policy import Policy
from ppo.prompt_files import read_prompts
from ppo.train import main, ppo_step
from ppo.trainer import Trainer, prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
HOW = {"temperature": 1.0, "impl": "torch"}


def tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.arange(16).view(2, 8) * 5 % 61 + 3
    mask = torch.ones(2, 4, dtype=torch.bool)
    return ids[:, :4], mask, ids[:, 4:], mask


@pytest.fixture
def trainer(folders: dict[str, str]) -> Callable[..., Trainer]:
    def make(sharing: str, **changes: Any) -> Trainer:
        settings = {
            **folders,
            "models.sharing": sharing,
            "rollout.batch_size": 4,
            "rollout.max_new_tokens": 5,
            "optim.actor_lr": 0.01,
            **changes,
        }
        config = parse_args([f"--{key}={value}" for key, value in settings.items()])
        set_seed(0)
        return prepare(config, load_models(config))

    return make


def step(trainer: Trainer) -> dict[str, float]:
    rows = read_prompts(str(trainer.config.prompts), "prompt")
    prompts = encode_prompts(trainer.models.tokenizer, rows, 64, "error", "here")
    return ppo_step(trainer, prompts.take(range(4)))[0]


def copies(parameters: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def test_the_lora_reference_is_the_base_bit_for_bit_after_training(
    trainer: Callable[..., Trainer], folders: dict[str, str]
) -> None:
    ours = trainer("lora")
    step(ours)
    assert step(ours)["objective/kl"] != 0.0
    base = Policy(AutoModelForCausalLM.from_pretrained(folders["actor"]).eval())
    with torch.no_grad():
        expected = base(*tokens(), **HOW).logprobs
        assert torch.equal(ours.models.ref(*tokens(), **HOW).logprobs, expected)
        assert not torch.equal(ours.models.actor(*tokens(), **HOW).logprobs, expected)


def test_each_role_moves_its_own_adapter_and_the_base_is_there_once(
    trainer: Callable[..., Trainer],
) -> None:
    ours = trainer("lora", **{"optim.critic_lr": 0.0})
    peft, critic = ours.models.actor.model, ours.models.critic
    assert critic is not None
    base = [p for n, p in peft.named_parameters() if "lora" not in n]
    before = [copies(each) for each in (role_parameters(peft, ACTOR), critic.trained(), base)]
    step(ours)
    after = [role_parameters(peft, ACTOR), critic.trained(), base]
    moved = [
        any(not torch.equal(x, y) for x, y in zip(old, new, strict=True))
        for old, new in zip(before, after, strict=True)
    ]
    assert moved == [True, False, False]
    assert {id(p) for p in base} <= {id(p) for p in critic.trunk.parameters()} | {
        id(p) for p in peft.parameters()
    }
    assert ours.models.ref.model is peft


def test_copies_of_whole_layers_are_left_out_of_the_reference(llama: PreTrainedModel) -> None:
    from peft import LoraConfig, get_peft_model

    base = copy.deepcopy(llama)
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(llama, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "lora_B" in name:
                parameter.add_(0.5)
        actor = Policy(model, adapter=ACTOR)(*tokens(), **HOW).logprobs
        found = Policy(model, adapter=REFERENCE)(*tokens(), **HOW).logprobs
        expected = Policy(base)(*tokens(), **HOW).logprobs
    assert torch.equal(found, expected)
    assert not torch.allclose(actor, expected)


def test_gradients_survive_the_change_of_roles_and_checkpointing(llama: PreTrainedModel) -> None:
    torch.manual_seed(0)
    model = add_adapters(llama, [ACTOR, CRITIC], rank=2, alpha=4.0, targets=None)
    with torch.no_grad():
        for parameter in role_parameters(model, ACTOR):
            parameter.normal_(std=0.1)
    actor, found = Policy(model, adapter=ACTOR), []
    for checkpointing in (False, True):
        if checkpointing:
            old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"
            enable = getattr(llama, new, None) or getattr(llama, old)  # the name changes with v6
            enable({"use_reentrant": False})
            model.train()
        logprobs = actor(*tokens(), **HOW).logprobs
        if not checkpointing:
            activate(model, CRITIC)  # the graph is made: its gradients must still arrive
        logprobs.sum().backward()
        found.append([p.grad.clone() for p in role_parameters(model, ACTOR)])
        model.zero_grad(set_to_none=True)
    for plain, again in zip(*found, strict=True):
        assert plain.any()
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize("sharing", ["lora", "trunk"])
def test_saved_roles_train_on(folders: dict[str, str], tmp_path: Path, sharing: str) -> None:
    flags = [f"--{key}={value}" for key, value in folders.items()]
    flags += [f"--models.sharing={sharing}", "--rollout.batch_size=4", "--steps=1", "--threads=1"]
    assert main([*flags, f"--output-dir={tmp_path / 'one'}"]) == 0
    (run,) = (tmp_path / "one").iterdir()
    again = [f"--actor={run}/actor", f"--ref={folders['actor']}"]
    again += [f"--critic={run}/critic"] if sharing == "lora" else []
    assert main([*flags, *again, f"--output-dir={tmp_path / 'two'}"]) == 0
    AutoModelForCausalLM.from_pretrained(run / "actor")


@pytest.mark.parametrize("reaches", [False, True])
def test_the_value_loss_stops_at_the_head_unless_it_may_not(
    trainer: Callable[..., Trainer], reaches: bool
) -> None:
    ours = trainer("trunk", **{"models.value_gradient": reaches})
    out = ours.models.actor(*tokens(), with_logprobs=False, with_values=True, **HOW)
    assert out.values.shape == (2, 5)
    out.values.sum().backward()
    trunk = [parameter.grad is not None for parameter in ours.models.actor.trained()]
    assert any(trunk) == reaches
    assert all(p.grad is not None for p in ours.models.actor.value_head.parameters())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ppo.advantage_estimator=reinforce_pp"], "models.sharing must be separate or lora"),
        (["--critic=somewhere"], "critic must be null for models.sharing trunk"),
    ],
)
def test_what_a_trunk_cannot_do_is_refused(
    folders: dict[str, str], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"--{key}={value}" for key, value in folders.items()]
    assert main([*own, "--models.sharing=trunk", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("sharing", ["separate", "trunk", "lora"])
def test_the_critic_alone_learns_in_the_warm_up(
    trainer: Callable[..., Trainer], sharing: str
) -> None:
    ours = trainer(sharing, **{"ppo.critic_warmup_steps": 1, "optim.warmup_steps": 2})
    before = copies(ours.models.actor.trained())
    assert ours.critic is not None
    values = copies(ours.critic.parameters)
    metrics = step(ours)
    assert "loss/policy_avg" not in metrics
    assert metrics["policy/updates"] == 4
    now = ours.models.actor.trained()
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(values, ours.critic.parameters, strict=True))
    assert ours.actor.scheduler.last_epoch == 0
    step(ours)
    assert not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_the_critics_bias_starts_at_the_mean_score(trainer: Callable[..., Trainer]) -> None:
    ours = trainer("trunk", **{"ppo.critic_bias_from_scores": True, "optim.critic_lr": 0.0})
    head = ours.models.value_head
    assert head is not None
    with torch.no_grad():
        head.weight.zero_()
    expected = step(ours)["objective/shaped_scores"]
    assert head.bias.tolist() == pytest.approx([expected], abs=1e-5)
    step(ours)  # only the first rollout moves it, as the learning rate is 0
    assert head.bias.tolist() == pytest.approx([expected], abs=1e-5)
