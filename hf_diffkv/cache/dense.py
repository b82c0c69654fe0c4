"""Dense attention for keys and values outside a `DiffKVCache`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.softmax import Softmax


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    dropout: float,
    causal: bool,
) -> Tensor:
    """Computes differentiable attention, [batch, query_heads, queries, value_dim].

    Args:
        query: [batch, query_heads, queries, head_dim].
        key, value: [batch, kv_heads, keys, dim].
        mask: bool or additive [batch, 1, queries, keys], bool [batch, keys], or None.
        softmax: scaling, soft capping and attention sinks.
        dropout: probability of dropping an attention weight.
        causal: whether, without a mask, queries see only keys up to their own position, aligned at the last key.
    """
    scaling, softcap, sinks = softmax.scaling, softmax.softcap, softmax.sinks
    group = query.shape[1] // key.shape[1]
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim == 2:
        mask = mask.bool()[:, None, None, :]
        if causal and queries > 1:
            mask = mask & _causal(queries, keys, query.device)
    aligned = mask is None and causal and queries > 1
    if aligned and queries != keys:
        mask, aligned = _causal(queries, keys, query.device), False
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if softcap is None and sinks is None:
        options = {"attn_mask": mask, "dropout_p": dropout, "is_causal": aligned, "scale": scaling}
        return F.scaled_dot_product_attention(query, key, value, **options)
    logits = torch.matmul(query, key.mT) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if aligned:
        mask = _causal(queries, keys, query.device)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(logits.shape[0], -1, queries, 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits.float(), dim=-1).nan_to_num(0.0)
    weights = F.dropout(weights[..., :keys], p=dropout, training=dropout > 0).to(value.dtype)
    return torch.matmul(weights, value)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
