"""One base model, several roles: PEFT adapters for actor and critic, none for the reference."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ppo.schema import InputError

ACTOR, CRITIC, REFERENCE = "default", "critic", "reference"
"""Names of the roles. PEFT saves "default" at the top of a folder, where transformers finds it."""


def activate(model: nn.Module, role: str | None) -> None:
    """Make the model play a role until the next call; None leaves it as it is.

    The reference is the base with every adapter off, copies of `modules_to_save` included. PEFT
    turns off `requires_grad` of the adapters that are not at work; autograd would then drop their
    gradients without a word, so what trains is restored. The role stays after the forward pass
    because checkpointed activations are computed again in the backward pass.
    """
    if role is None:
        return
    peft: Any = model
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if role == REFERENCE:
        peft.base_model.disable_adapter_layers()
    else:
        peft.base_model.enable_adapter_layers()
        peft.set_adapter(role)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trains:
        parameter.requires_grad_(True)


def add_adapters(
    base: PreTrainedModel, roles: list[str], *, rank: int, alpha: float, targets: str | None
) -> Any:
    """Wrap a model with a LoRA adapter for each role; everything else is frozen.

    W' = W + (α/r)·B·A with A [r, in] random and B [out, r] zero, so that each role starts as the
    base (Hu et al. 2021, https://arxiv.org/abs/2106.09685). No dropout.

    Args:
        base: a causal LM.
        roles: `ACTOR`, and `CRITIC` where there is one.
        rank: r >= 1.
        alpha: α > 0.
        targets: names of layers, separated by commas. None: all linear ones but the head.

    Raises:
        InputError: PEFT is not installed, or no layer has such a name.
    """
    peft = _peft()
    modules = "all-linear" if targets is None else [name.strip() for name in targets.split(",")]
    model: Any = None
    for role in roles:
        settings = peft.LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=modules, lora_dropout=0.0,
            task_type="CAUSAL_LM" if role == ACTOR else None,
        )  # fmt: skip
        try:
            with _quiet():
                if model is None:
                    model = peft.get_peft_model(base, settings, adapter_name=role)
                else:
                    model.add_adapter(role, settings)
        except ValueError as error:
            raise InputError(f"models.lora_targets: {str(error).splitlines()[0]}") from None
    return _all_train(model, roles)


def load_adapters(base: PreTrainedModel, folders: dict[str, Path]) -> Any:
    """Wrap a model with adapters that were saved, one folder for each role."""
    peft = _peft()
    model: Any = None
    for role, folder in folders.items():
        try:
            with _quiet():
                if model is None:
                    model = peft.PeftModel.from_pretrained(
                        base, folder, adapter_name=role, is_trainable=True
                    )
                else:
                    model.load_adapter(folder, adapter_name=role, is_trainable=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"cannot load the adapter {folder}: {error}") from None
    return _all_train(model, list(folders))


def base_of_adapter(folder: str) -> str | None:
    """The model that a folder's adapter belongs to; None where the folder holds no adapter."""
    if not (Path(folder) / "adapter_config.json").is_file():
        return None
    return str(_peft().PeftConfig.from_pretrained(folder).base_model_name_or_path)


def role_parameters(model: nn.Module, role: str) -> list[nn.Parameter]:
    """What trains in this role, and in no other."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if role in name.split(".") and parameter.requires_grad
    ]


def save_adapter(model: Any, role: str, folder: Path) -> None:
    """Write one role's adapter as a PEFT folder that loads on top of the base."""
    model.save_pretrained(folder, selected_adapters=[role])
    inner = folder / role
    if inner.is_dir():  # PEFT gives every adapter but "default" a folder of its own
        for file in inner.iterdir():
            file.rename(folder / file.name)
        shutil.rmtree(inner)


def _all_train(model: Any, roles: list[str]) -> Any:
    for name, parameter in model.named_parameters():
        trains = any(role in name.split(".") for role in roles)
        parameter.requires_grad_(trains and parameter.is_floating_point())
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT asks transformers for an attribute by its old name; that is no news for a person."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError(
            "models.sharing: lora needs PEFT, which is not installed (pip install peft)"
        ) from None
    return peft


def merged(base: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with the folder's adapter added to its weights."""
    model = load_adapters(base, {ACTOR: Path(folder)}).merge_and_unload()
    result: PreTrainedModel = model.requires_grad_(True)
    return result
