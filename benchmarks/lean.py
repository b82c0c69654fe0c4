"""Dense steps that do not expand keys and values: a group's queries are passed as tokens of its KV head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

LEAN = "lean"


def lean_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' "sdpa", whose mask makes it repeat keys and values per query head, except for single tokens."""
    if query.shape[2] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, tokens, dim = key.shape
    mask = None if attention_mask is None else attention_mask[..., :tokens]
    grouped = query.reshape(batch, heads, -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, 1, -1, value.shape[3]), None


def register() -> None:
    """Registers it with Transformers as `LEAN`."""
    AttentionInterface.register(LEAN, lean_attention)
    AttentionMaskInterface.register(LEAN, sdpa_mask)
