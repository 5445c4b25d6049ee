"""Where a causal LM's logits come from: its decoder, its LM head, and what it does in between."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_kernels import linear_token_logprobs

VALUE_HEAD = "value_head.safetensors"
# How far the two ways may differ on a handful of tokens, in nats: rounding of each format.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class LinearHead:
    """logits = softcap·tanh(scale·(W h + b)/softcap), or scale·(W h + b) without softcap."""

    logit_scale: float = 1.0
    logit_softcap: float | None = None


def save_head(head: nn.Linear, folder: Path) -> None:
    """Write the scalar head of a critic into a folder that exists."""
    save_file(
        {name: tensor.contiguous() for name, tensor in head.state_dict().items()},
        folder / VALUE_HEAD,
    )


def position_ids(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """Positions that count from each row's first real token, where the model takes them."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(1) - 1).clamp(min=0)}


def causal_inputs(
    model: nn.Module,
    prompts: Tensor,
    prompt_mask: Tensor,
    responses: Tensor,
    response_mask: Tensor,
) -> dict[str, Any]:
    """Prompt and response of each row, as the model's forward takes them."""
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask.long(),
        **position_ids(model, attention_mask),
        "use_cache": False,
    }


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT one, adapters in place."""
    inner = getattr(model, "get_base_model", None)
    return cast(PreTrainedModel, inner() if inner is not None else model)


def decoder(model: nn.Module) -> nn.Module:
    """The model up to the last hidden state."""
    return _unwrapped(model).base_model


def head_parameters(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V,D] and bias [V] of the LM head."""
    head = cast(Any, _unwrapped(model).get_output_embeddings())
    return (head.weight.T if isinstance(head, Conv1D) else head.weight), head.bias


def find_head(model: PreTrainedModel) -> tuple[LinearHead | None, str | None]:
    """Describe the LM head, or say why the logits path is taken."""
    inner = _unwrapped(model)
    head = inner.get_output_embeddings()
    if type(head) is not nn.Linear and not isinstance(head, Conv1D):
        return None, f"its output layer is a {type(head).__name__}, not a plain linear layer"
    if inner.base_model is inner:
        return None, "its decoder cannot be called apart from its head"
    config: Any = inner.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    found = LinearHead(scale, getattr(config, "final_logit_softcapping", None))
    difference = _difference(model, found)
    tolerance = TOLERANCE.get(head.weight.dtype, 1e-4)
    if not difference <= tolerance:
        return None, f"its logits are not those of a linear head (off by {difference:.2g} nats)"
    return found, None


@torch.no_grad()
def _difference(model: PreTrainedModel, head: LinearHead) -> float:
    """Largest difference of the two ways over a few tokens, one row padded on the left."""
    device = next(model.parameters()).device
    columns = head_parameters(model)[0].shape[0]
    ids = torch.arange(24, device=device).view(2, 12) * 7 % columns
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :2] = False
    training = model.training
    model.eval()
    try:
        inputs = causal_inputs(model, ids[:, :6], mask[:, :6], ids[:, 6:], mask[:, 6:])
        expected = model(**inputs).logits[:, 5:-1].float().log_softmax(-1)
        hidden = decoder(model)(**inputs).last_hidden_state[:, 5:-1]
        weight, bias = head_parameters(model)
        found = linear_token_logprobs(
            hidden,
            weight,
            ids[:, 6:],
            bias=bias,
            logit_scale=head.logit_scale,
            logit_softcap=head.logit_softcap,
            impl="torch",
        )
        picked = expected.gather(-1, ids[:, 6:, None]).squeeze(-1)
        return float((found - picked).abs().max())
    finally:
        model.train(training)
