"""Decoders without padding: the tokens of all rows in one row, each sequence attending to itself.

Every layer then works on real tokens only. Positions start again with each sequence, and attention
runs sequence by sequence (flash-attn's varlen kernel where it is installed and takes the dtype).
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from ppo.heads import causal_inputs

Tokens: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""prompts [B,P], prompt_mask [B,P], responses [B,T], response_mask [B,T]"""

NAME = "ppo_packed"
# How far both ways may differ in a check, relative to the largest hidden state.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence where the mask holds lengths; otherwise as SDPA does.

    Args:
        module: the attention layer.
        query: [1,H,N,d], as key and value (fewer heads with grouped queries).
        key: see query.
        value: see query.
        attention_mask: lengths of the packed sequences, [1,1,1,B] int64 on the CPU, of sum N; any
            other mask is SDPA's own.
        options: those of transformers' attention functions.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    lengths: list[int] = attention_mask.flatten().tolist()
    if query.is_cuda and query.element_size() == 2 and is_flash_attn_2_available():
        ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
        longest = max(lengths)
        flash = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        out = flash(
            module, query, key, value, None,
            cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest,
            **options,
        )  # fmt: skip
        return out[0], None
    window = options.get("sliding_window")
    options["is_causal"] = True
    parts = []
    cut = (torch.split(each, lengths, 2) for each in (query, key, value))
    for q, k, v in zip(*cut, strict=True):
        mask = None
        if window is not None and q.shape[2] > window:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
            mask = mask.tril().triu(1 - window)[None, None]
        parts.append(sdpa_attention_forward(module, q, k, v, mask, **options)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def padded_states(decoder: nn.Module, tokens: Tokens) -> Tensor:
    """Hidden states before each response token and after the last column, [B,T+1,D]."""
    states: Tensor = decoder(**causal_inputs(decoder, *tokens)).last_hidden_state
    return states[:, tokens[0].shape[1] - 1 :]


def packed_states(decoder: nn.Module, tokens: Tokens) -> Tensor:
    """The same from one row without padding.

    States of padding are copies of the first state of all; nothing may read them.

    Args:
        decoder: one that `why_padded` finds nothing against.
        tokens: rows whose responses have no holes.
    """
    prompts, prompt_mask, responses, response_mask = tokens
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    ids = torch.cat([prompts, responses], dim=1)
    hidden: Tensor = decoder(
        input_ids=ids[mask][None],
        position_ids=(mask.cumsum(1) - 1)[mask][None],
        attention_mask=mask.sum(1).cpu().view(1, 1, 1, -1),
        use_cache=False,
    ).last_hidden_state[0]
    places = mask.new_zeros(mask.shape, dtype=torch.int64)
    places[mask] = torch.arange(len(hidden), device=mask.device)
    wanted = places[:, prompts.shape[1] - 1 :]
    picked = hidden.index_select(0, wanted.flatten())
    return picked.view(*wanted.shape, -1)


def pack(decoder: PreTrainedModel) -> str | None:
    """Make a decoder ready for `packed_states`, or say why it keeps its padding."""
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return "it takes no position_ids"
    found = decoder.config._attn_implementation
    if found == NAME:
        return None
    if found not in ("sdpa", "flash_attention_2"):
        return f"its attention is {found!r}, not sdpa"
    columns = int(decoder.config.get_text_config().vocab_size)
    try:
        before = _probe(decoder, columns, packed=False)
        decoder.set_attn_implementation(NAME)
        after = _probe(decoder, columns, packed=True)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        decoder.set_attn_implementation(found)
        return f"it does not run packed ({str(error).splitlines()[0]})"
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= TOLERANCE.get(before.dtype, 1e-4):
        decoder.set_attn_implementation(found)
        return f"its hidden states differ when packed (by {difference:.2g} of the largest)"
    return None


@torch.no_grad()
def _probe(decoder: PreTrainedModel, columns: int, *, packed: bool) -> Tensor:
    """Hidden states that count, of three rows of different length, with and without padding."""
    device = next(decoder.parameters()).device
    ids = torch.arange(3 * 16, device=device).view(3, 16) * 7 % columns
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3], mask[2, 10:] = False, False
    tokens = (ids[:, :6], mask[:, :6], ids[:, 6:], mask[:, 6:])
    training = decoder.training
    decoder.eval()
    try:
        states = (packed_states if packed else padded_states)(decoder, tokens)
    finally:
        decoder.train(training)
    return states[:, 1:][mask[:, 6:]]
