"""Decode attention over pages and window in plain PyTorch: split along the sequence, merged at the end.

Codes are converted to floats but never scaled one by one: with key = scale * code + zero,
    logit = scale * (query . code) + zero * sum(query),   output = sum(p * scale * code) + sum(p * zero).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...pages import HIGH, LOW, LayerRows
from ...pages.rows import held_tokens
from ..backend import compute_dtype
from ..softmax import Softmax
from ..tiles import Tiles
from .held import Held
from .reference_tier import Partials, TierAttention


def decode_attention(
    query: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    tiles: tuple[Tiles, Tiles],
    valid: Tensor | None = None,
    held: Held | None = None,
) -> Tensor:
    """Attention of the newest token of every request, which already stands in the window.

    Args:
        query: [batch, query_heads, key_dim].
        rows: the sums of attended tokens are updated.
        tiles: pieces that cover all high and all low pages.
        valid: bool [batch]; where False the newest token is padding: zeros are returned and nothing scores.
        held: joins the attentions of several layers to the same tokens; None where this is the only one.

    Returns:
        [batch, query_heads, value_dim] in the query's dtype. To each attended token but the newest its sum gains the
        maximum over the group of the probabilities; with `held`, the last attention adds the maximum over all of them.
        Where pages have no scores, no sum changes, those of the window included, and `held` stays as it is.
    """
    batch, kv_heads, length = rows.batch, rows.heads, rows.length
    dtype = compute_dtype(query.dtype)
    group = query.shape[1] // kv_heads
    scaled = (query.to(dtype) * softmax.scaling).view(rows.count, group, -1)
    if valid is None:
        valid = length > 0
    scoring = valid.repeat_interleave(kv_heads)
    # padding may hold anything, and zero times infinity is not zero
    scaled = torch.where(scoring[:, None, None], scaled, 0.0)
    tokens = held_tokens(rows.window_start, length, rows.sink_end, rows.sink_slots, rows.slots)
    window = _window_logits(scaled, rows.window_key, tokens, softmax.softcap)
    merged = _window_partials(window, rows.window_value, softmax.sinks, group)
    pieces = []
    for tier in (HIGH, LOW):
        if tiles[tier].row.numel():
            piece = TierAttention(rows, tier, tiles[tier])
            piece.attend(scaled, merged, softmax.softcap)
            pieces.append(piece)
    total = torch.where(merged.total == 0, 1.0, merged.total)
    output = torch.where(scoring[:, None, None], merged.output / total[..., None], 0.0)
    output = output.view(batch, kv_heads * group, -1).to(query.dtype)
    if not rows.layout.selects:
        return output
    log_total = merged.peak + torch.log(total)
    received = [piece.received(log_total, scoring) for piece in pieces]
    received.append(_window_received(window, log_total, tokens == length[:, None] - 1, scoring, kv_heads))
    if held is not None:
        before = received if held.received is None else held.received
        received = held.received = [torch.maximum(*pair) for pair in zip(received, before)]
    if held is None or held.last:
        for piece, gained in zip(pieces, received):
            piece.add_scores(gained, length.repeat_interleave(kv_heads))
        rows.window_score.add_(received[-1].view_as(rows.window_score))
    return output


def _window_logits(query: Tensor, key: Tensor, tokens: Tensor, softcap: float | None) -> Tensor:
    """Logits [rows, group, slots] of the window, -inf in empty slots."""
    batch, kv_heads, slots = key.shape[:3]
    logits = torch.bmm(query, key.reshape(batch * kv_heads, slots, -1).to(query.dtype).mT)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    present = (tokens >= 0).repeat_interleave(kv_heads, dim=0)
    return logits.masked_fill(~present[:, None], -torch.inf)


def _window_partials(logits: Tensor, value: Tensor, sinks: Tensor | None, group: int) -> Partials:
    batch, kv_heads, slots = value.shape[:3]
    peak = logits.amax(-1)
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, kv_heads, group).expand(batch, -1, -1).reshape(-1, group)
        peak = torch.maximum(peak, sink)
    safe = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(logits - safe[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - safe)
    value = value.reshape(batch * kv_heads, slots, -1).to(logits.dtype)
    empty = (weights == 0).all(1)[..., None]
    return Partials(safe, total, torch.bmm(weights, value.masked_fill(empty, 0.0)))


def _window_received(logits: Tensor, log_total: Tensor, newest: Tensor, scoring: Tensor, kv_heads: int) -> Tensor:
    """Each slot's largest probability within the group, float32 [rows, slots]; 0 for the newest token."""
    received = torch.exp(logits - log_total[..., None]).amax(1)
    counted = scoring[:, None] & ~newest.repeat_interleave(kv_heads, dim=0)
    return torch.where(counted, received, 0.0).float()
