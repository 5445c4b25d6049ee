"""Activations that are not kept: each layer runs again in the backward pass.

Source: Chen et al. 2016, section 4, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(decoder: nn.Module) -> None:
    """Keep a layer's input only, and run it again going back.

    Transformers' own switch works in training mode alone, where dropout would be on; PPO's ratio
    needs it off. Passes without gradient, sampling with its cache among them, run as before.

    Raises:
        ValueError: the model has no layers of the kind that can be run again.
    """
    layers = [each for each in decoder.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(decoder).__name__} has no layers that can be computed again")
    for layer in layers:
        layer.forward = partial(_run, layer.forward)


def _run(forward: Any, *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    # no dropout, so no random state
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)
