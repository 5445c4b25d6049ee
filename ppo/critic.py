"""The value function: a decoder with a scalar head, and where both come from."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ppo.adapters import CRITIC, activate, role_parameters, save_adapter
from ppo.heads import VALUE_HEAD, save_head
from ppo.model_folders import load_model, read_config
from ppo.packing import pack, packed_states, padded_states
from ppo.schema import InputError


class Critic(nn.Module):
    """A decoder with a scalar head: V(s_t) for every position.

    With an adapter, the decoder is the base that all roles share, and `shared` the PEFT model
    around it.
    """

    def __init__(
        self,
        trunk: PreTrainedModel,
        head: nn.Linear,
        *,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.packed = False
        self._shared = [shared] if shared is not None else []  # a list hides it from nn.Module

    def forward(
        self, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, response_mask: Tensor
    ) -> Tensor:
        """Return V before each response token and after the last column, [B,T+1] fp32."""
        for shared in self._shared:
            activate(shared, CRITIC)
        run = packed_states if self.packed else padded_states
        hidden = run(self.trunk, (prompts, prompt_mask, responses, response_mask))
        values: Tensor = self.head(hidden).squeeze(-1).float()
        return values

    def pack(self) -> str | None:
        """Leave padding out from now on, or say why it stays."""
        why = pack(self.trunk)
        self.packed = why is None
        return why

    def trained(self) -> list[nn.Parameter]:
        """The parameters that its optimiser moves."""
        if self._shared:
            return [*role_parameters(self.trunk, CRITIC), *self.head.parameters()]
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def save_pretrained(self, folder: Path) -> None:
        """Write the trunk as an ordinary model folder (or its adapter), and the head beside it."""
        if self._shared:
            save_adapter(self._shared[0], CRITIC, folder)
        else:
            self.trunk.save_pretrained(folder)
        save_head(self.head, folder)


def load_critic(source: str, dtype: torch.dtype) -> Critic:
    """Build a critic from a model folder: its trunk, and its scalar head where it has one.

    A causal LM has none: its head starts at N(0, 1/(D+1)) with bias 0 (Stiennon et al. 2020).
    """
    architecture = (read_config("critic", source).architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        full = load_model(AutoModelForSequenceClassification, "critic", source, dtype=dtype)
    elif architecture.endswith("ForTokenClassification"):
        full = load_model(AutoModelForTokenClassification, "critic", source, dtype=dtype)
    else:
        full = None
    trunk = (
        full.base_model
        if full is not None
        else load_model(AutoModel, "critic", source, dtype=dtype)
    )
    head = new_head(trunk.config, dtype)
    if not load_head(head, source) and full is not None:
        _copy_head(full, head, source)
    return Critic(trunk, head)


def new_head(config: PretrainedConfig, dtype: torch.dtype) -> nn.Linear:
    head = nn.Linear(config.get_text_config().hidden_size, 1).to(dtype)
    nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    nn.init.zeros_(head.bias)
    return head


def load_head(head: nn.Linear, source: str | None) -> bool:
    """Take the head that a run saved in this folder, if it did."""
    saved = Path(source or "") / VALUE_HEAD
    if not source or not saved.is_file():
        return False
    head.load_state_dict(load_file(saved))
    return True


def _copy_head(full: PreTrainedModel, head: nn.Linear, source: str) -> None:
    own = getattr(full, "score", None) or getattr(full, "classifier", None)
    if not isinstance(own, nn.Linear) or own.weight.shape != head.weight.shape:
        raise InputError(f"critic: {source} has no scalar head that could start the value function")
    with torch.no_grad():
        head.weight.copy_(own.weight)
        if own.bias is not None:
            head.bias.copy_(own.bias)
