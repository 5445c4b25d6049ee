"""Log-probabilities without logits, for every kind of LM head: equal to the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo.heads import causal_inputs
from ppo.policy import Policy

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_STYLE = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
HEAD_DIM = {**SMALL, "head_dim": 8}
# family: class name, settings, and what is unusual about its head
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT_STYLE),
    "llama": ("Llama", SMALL),
    "llama-tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("Mistral", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", HEAD_DIM),
    "gemma2": ("Gemma2", {**HEAD_DIM, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", HEAD_DIM),
    "phi": ("Phi", {**SMALL, "num_key_value_heads": 4}),
    "phi3": ("Phi3", SMALL),
    "cohere": ("Cohere", {**SMALL, "logit_scale": 0.0625}),
    "granite": ("Granite", {**SMALL, "logits_scaling": 8.0}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt-neox": ("GPTNeoX", SMALL),
    "gpt-j": ("GPTJ", {**GPT_STYLE, "rotary_dim": 4}),
    "falcon": ("Falcon", SMALL),
    "stablelm": ("StableLm", SMALL),
    "olmo2": ("Olmo2", SMALL),
    "smollm3": ("SmolLM3", SMALL),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
MODELS = {"GPT2": "GPT2LMHeadModel"}


def make(family: str) -> PreTrainedModel:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    model_class = getattr(transformers, MODELS.get(name, f"{name}ForCausalLM"))
    model = model_class(config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():  # biases start at 0, which would hide them
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    prompts, responses = (torch.randint(3, 64, (3, n), generator=g) for n in (4, 6))
    prompt_mask = torch.tensor([[True] * 4, [False] + [True] * 3, [False] * 2 + [True] * 2])
    response_mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4, [True] * 5 + [False]])
    return prompts, prompt_mask, responses, response_mask


def by_logits(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor]:
    """From the model's own logits, in float64."""
    prompts, prompt_mask, responses, mask = batch()
    inputs = causal_inputs(model, prompts, prompt_mask, responses, mask)
    logits = model(**inputs).logits[:, 3:-1].double() / temperature
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(-1, responses[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logprobs.masked_fill(~mask, 0), entropy.masked_fill(~mask, 0)


def agree(model: PreTrainedModel, policy: Policy) -> None:
    """Values, and the gradient of every parameter."""
    expected = by_logits(model, 0.7)
    weights = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(2))
    sum((w * e).sum() for w, e in zip(weights, expected, strict=True)).backward()
    gradients = {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    found = policy(*batch(), temperature=0.7, with_entropy=True, impl="torch")[:2]
    sum((w * f).sum() for w, f in zip(weights, found, strict=True)).backward()
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.double(), e, atol=2e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], atol=5e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_its_own_logits(family: str) -> None:
    model = make(family)
    policy = Policy(model)
    assert policy.why_logits is None
    agree(model, policy)


def test_resized_embeddings_agree() -> None:
    model = make("llama-tied")
    model.resize_token_embeddings(70, pad_to_multiple_of=16, mean_resizing=False)
    policy = Policy(model)
    assert policy.why_logits is None
    assert model.lm_head.weight.shape[0] == 80
    agree(model, policy)


def forbid_logits(*_: object, **__: object) -> None:
    raise AssertionError("the head was called")


def test_the_head_itself_is_never_called() -> None:
    model = make("llama")
    policy = Policy(model)
    model.lm_head.forward = forbid_logits
    policy(*batch(), temperature=1.0, with_entropy=False, impl="torch")


class Shifted(nn.Module):
    """A model that does something of its own with its logits."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, logits: Tensor) -> Tensor:
        return self.change(logits)


def test_a_model_that_changes_its_logits_keeps_them() -> None:
    model = make("llama")
    model.register_forward_hook(lambda _m, _i, out: out.__setitem__("logits", out.logits**3) or out)
    policy = Policy(model)
    assert policy.head is None
    assert policy.why_logits is not None
    assert policy.why_logits.startswith("its logits are not those of a linear head (off by ")
    agree(model, policy)


def test_a_head_that_is_no_plain_linear_layer_keeps_its_logits() -> None:
    model = make("llama")
    plain = model.lm_head
    model.lm_head = nn.Sequential(plain)
    model.get_output_embeddings = lambda: model.lm_head
    policy = Policy(model)
    assert policy.why_logits == "its output layer is a Sequential, not a plain linear layer"
    agree(model, policy)


# peft asks transformers 5 for an attribute by its old name
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("adapted", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora_wrapped_models_agree(adapted: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make("llama"), peft.LoraConfig(target_modules=adapted, r=2, init_lora_weights=False)
    ).eval()
    policy = Policy(model)
    assert (policy.head is None) == ("lm_head" in adapted)
    agree(model, policy)
    frozen = model.get_base_model().get_output_embeddings().weight
    assert frozen.grad is None
