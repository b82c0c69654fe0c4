"""Prompt attention on CPUs in half precision by PyTorch's flash attention, for prompts without a mask or softcap.

A key receives the sum over queries of exp(logit - logsumexp of the query). This is the exponential of the logsumexp of
another attention, in which the keys are the queries, the queries are the keys, and each query's logsumexp is subtracted
as a mask. A second pass of the same kernel thus gives the significance, without any logits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages import EarlierTokens
from ...pages.rows import NO_PAST
from ..softmax import Softmax
from .reference import dense_tokens, scale_up

# finite, so that a row without visible keys still has a logsumexp, negligible next to any other
HIDDEN = -1e30
FLASH_DTYPES = (torch.bfloat16, torch.float16)


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None) -> bool:
    """Returns whether this module's `prefill_attention` supports these arguments."""
    plain = mask is None and softcap is None and key.shape[-1] == value.shape[-1]
    known = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return plain and known and query.device.type == "cpu" and query.dtype in FLASH_DTYPES


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    *,
    past: EarlierTokens = NO_PAST,
    valid: Tensor | None = None,
    mask: None = None,
    observed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attends from new tokens as `reference.prefill_attention` does; stored tokens are rounded to the query's dtype."""
    batch, query_heads, length, _ = query.shape
    kv_heads = key.shape[1]
    stored, tokens = dense_tokens(past), past.tokens
    if stored is not None:
        past_key, past_value, there = stored
        absent = ~there[..., None]
        stored = *(part.to(query.dtype).masked_fill(absent, 0.0) for part in (past_key, past_value)), there
    if valid is None or bool(valid.all()):
        return _attend(query, key, value, stored, softmax, observed)
    output = query.new_zeros(batch, query_heads, length, value.shape[-1])
    received = (
        torch.zeros(batch, kv_heads, tokens + length, dtype=torch.float32, device=query.device)
        if observed != 0
        else None
    )
    for row in range(batch):
        # padding may hold any value, so it is removed rather than masked
        real = valid[row].nonzero()[:, 0]
        if not len(real):
            continue
        own = slice(row, row + 1)
        parts = (part[own].index_select(2, real) for part in (query, key, value))
        behind = None if stored is None else tuple(part[own] for part in stored)
        row_output, row_received = _attend(*parts, behind, softmax, observed)
        output[row].index_copy_(1, real, row_output[0])
        if observed == 0:
            continue
        received[row, :, :tokens] = row_received[0, :, :tokens]
        received[row].index_copy_(1, tokens + real, row_received[0, :, tokens:])
    return output, received


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: tuple[Tensor, Tensor, Tensor] | None,
    softmax: Softmax,
    window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Attends from tokens without padding."""
    scaling, sinks = softmax.scaling, softmax.sinks
    batch, query_heads, length, _ = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    tokens = 0 if stored is None else stored[0].shape[2]
    output = query.new_empty(batch, kv_heads, group, length, value.shape[-1])
    received = torch.zeros(batch, kv_heads, tokens + length, dtype=torch.float32, device=query.device)
    observed = length if window is None else min(window, length)
    early = length - observed
    reversed_key = key[:, :, early:].flip(2)
    grouped = query.unflatten(1, (kv_heads, group))
    for head in range(group):
        asked = grouped[:, :, head]
        parts = [_flash(asked, key, value, scaling, causal=True)]
        if stored is not None:
            hidden = torch.where(stored[2], 0.0, HIDDEN)
            parts.append(_flash(asked, *stored[:2], scaling, hidden))
        sink = None if sinks is None else sinks.view(kv_heads, group)[:, head]
        output[:, :, head], total = _merge(parts, sink)
        if window == 0:
            continue
        asked, total = asked[:, :, early:], total[:, :, early:]
        given = torch.zeros_like(received)
        if stored is not None:
            given[:, :, :tokens] = _received(stored[0], asked, total, scaling).masked_fill_(~stored[2], 0.0)
        if early:
            given[:, :, tokens : tokens + early] = _received(key[:, :, :early], asked, total, scaling)
        if observed > 1:
            # later queries only: in reverse order, the first query attends to the second key, and so on
            backwards = (reversed_key[:, :, 1:], asked.flip(2)[:, :, :-1], total.flip(2)[:, :, :-1])
            given[:, :, tokens + early : -1] = _received(*backwards, scaling, causal=True).flip(2)
        received = torch.maximum(received, given)
    if window == 0:
        return output.flatten(1, 2), None
    if window is not None:
        scale_up(received, tokens, None, window)
    return output.flatten(1, 2), received


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, addend: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the output and the logsumexp, float32 [batch, heads, queries].

    Args:
        addend: term added to the logits of each key, float32 [batch, heads, keys], or None.
    """
    if addend is not None:
        # contiguous, because the kernel reads strided masks four times slower
        addend = addend.contiguous()[:, :, None]
        addend = addend.expand(-1, -1, query.shape[2], -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=addend, scale=scaling
    )


def _received(key: Tensor, query: Tensor, logsumexp: Tensor, scaling: float, causal: bool = False) -> Tensor:
    """Returns the sum of the probabilities that each key receives, [batch, heads, keys]."""
    return _flash(key, query, query, scaling, -logsumexp, causal)[1].exp()


def _merge(parts: list[tuple[Tensor, Tensor]], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merges softmaxes over parts of the keys and a sink per head (logits [heads]), whose share is dropped."""
    if len(parts) == 1 and sink is None:
        return parts[0]
    total = torch.stack([logsumexp for _, logsumexp in parts])
    if sink is not None:
        total = torch.cat([total, sink.float()[None, None, :, None].expand(1, *total.shape[1:])])
    total = total.logsumexp(0)
    output = sum(part.float() * (logsumexp - total).exp()[..., None] for part, logsumexp in parts)
    return output.to(parts[0][0].dtype), total
