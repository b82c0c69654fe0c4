"""Attention of several new tokens with absorbed queries, whose logits include part of the value (store/latent.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..pages import EarlierTokens
from .prefill_attention.reference import dense_tokens
from .softmax import Softmax


def with_absorbed_queries(
    prefill_attention: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns `prefill_attention` for absorbed queries; all tensors have the same form, the model's or the store's."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, past: EarlierTokens, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        stored = dense_tokens(past)
        if stored is not None:
            rope, latent, valid = (part.to(dtype) for part, dtype in zip(stored, (key.dtype, value.dtype, torch.bool)))
            past = EarlierTokens(key=torch.cat([rope, latent], dim=-1), value=latent, valid=valid)
        return prefill_attention(query, torch.cat([key, value], dim=-1), value, softmax, past=past, **options)

    return attend
