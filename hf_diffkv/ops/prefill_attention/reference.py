"""Blocked exact attention in plain PyTorch, which also yields the attention that each key receives.

A block of queries is processed with all its keys at once, so the probabilities are final and can be summed over the
block's queries immediately. No N x N matrix exists.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...pages import HIGH, LOW, EarlierTokens, LayerRows
from ...pages.rows import NO_PAST, compute_dtype, held_tokens
from ..compact import stored_tokens
from ..softmax import Softmax
from ..table import ops_for_rows

BLOCK_ELEMENTS = 1 << 21
MAX_QUERIES = 256
# exp(-80) is far below rounding error; smaller results would be subnormal, which CPUs multiply a hundred times slower
LOWEST_LOGIT = -80.0


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    *,
    past: EarlierTokens = NO_PAST,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    observed: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attends exactly and causally from Q new tokens over a past of P tokens and themselves.

    Args:
        query: query states, [batch, query_heads, Q, key_dim].
        key, value: key states, [batch, kv_heads, Q, key_dim], and value states, [batch, kv_heads, Q, value_dim].
        softmax: softmax parameters of the layer.
        past: tokens before the new ones.
        valid: False for padding, bool [batch, Q]; padding is not attended to, does not score and yields zeros. None if
            all tokens are real.
        mask: mask that replaces the causal rule among the new tokens, bool [batch, 1, Q, Q]; None is causal.
        observed: number of real queries at the end that give significance, which is scaled up to all; None takes all
            queries. 0 skips the received attention, which is then None.

    Returns:
        The attention output, [batch, query_heads, Q, value_dim] in the query's dtype, and the received attention,
        [batch, kv_heads, P + Q] in the compute dtype. A key receives the sum of the probabilities that later queries
        give it, maximised over the group; its own query does not count. P is `past.tokens`: a row's stored tokens
        by rank, padded with zeros, then the exact ones.
    """
    batch, query_heads, length, _ = query.shape
    kv_heads = key.shape[1]
    group = query_heads // kv_heads
    dtype = compute_dtype(query.dtype)
    device = query.device
    keys, values = key.to(dtype), value.to(dtype)
    if valid is not None:
        # padding may hold any value, and zero times infinity is NaN
        values = values.masked_fill(~valid[:, None, :, None], 0.0)
    before, past_valid, stored = dense_tokens(past), None, past.tokens
    if before is not None:
        past_key, past_value, past_valid = before
        keys = torch.cat([past_key.to(dtype), keys], dim=2)
        values = torch.cat([past_value.to(dtype), values], dim=2)
        values[:, :, :stored].masked_fill_(~past_valid[..., None], 0.0)
    output = torch.zeros(batch, query_heads, length, value.shape[-1], dtype=query.dtype, device=device)
    received = torch.zeros(batch, kv_heads, group, stored + length, dtype=dtype, device=device)
    grouped = query.unflatten(1, (kv_heads, group))
    counting = observation(valid, batch, length, observed, device)
    per_query = batch * group * (stored + length)
    block = max(1, min(length, MAX_QUERIES, BLOCK_ELEMENTS // per_query))
    heads = max(1, BLOCK_ELEMENTS // (per_query * block))
    position = torch.arange(length, device=device)
    sinks = softmax.sinks
    sinks = None if sinks is None else sinks.to(dtype).view(1, kv_heads, group, 1, 1)
    for first, start in itertools.product(range(0, kv_heads, heads), range(0, length, block)):
        chunk, stop = slice(first, first + heads), min(start + block, length)
        # without a mask, keys after the block's last query are hidden from all its queries
        end = length if mask is not None else stop
        logits = torch.matmul(
            grouped[:, chunk, :, start:stop].to(dtype).flatten(2, 3) * softmax.scaling,
            keys[:, chunk, : stored + end].mT,
        ).unflatten(2, (group, stop - start))
        if softmax.softcap is not None:
            logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
        there = None if past_valid is None else past_valid[:, chunk]
        hidden = _hidden(position, start, stop, end, stored, valid, there, mask)
        sink = None if sinks is None else sinks[:, chunk]
        probabilities = _softmax(logits, hidden, sink)
        block_output = torch.matmul(probabilities.flatten(2, 3), values[:, chunk, : stored + end])
        output.view(batch, kv_heads, group, length, -1)[:, chunk, :, start:stop] = block_output.unflatten(
            2, (group, stop - start)
        ).to(query.dtype)
        if observed == 0:
            continue
        # all queries of the block are later than the keys before it, but only some are later than the block's own keys
        counted = counting[:, start:stop].to(dtype)[:, None, None, None]
        earlier = slice(0, stored + start)
        received[:, chunk, :, earlier] += torch.matmul(counted, probabilities[..., earlier])[..., 0, :]
        later = (position[start:stop, None] > position[None, start:end]).to(dtype)
        own = slice(stored + start, stored + end)
        received[:, chunk, :, own] += (probabilities[..., own] * (counted.mT * later)).sum(3)
    if observed == 0:
        return output, None
    received = received.amax(2)
    if observed is not None:
        scale_up(received, stored, valid, observed)
    return output, received


def _hidden(
    position: Tensor,
    start: int,
    stop: int,
    end: int,
    past: int,
    valid: Tensor | None,
    past_valid: Tensor | None,
    mask: Tensor | None,
) -> list[tuple[slice, Tensor]]:
    """Returns the keys hidden from queries [start, stop), as ranges of keys with masks.

    The masks broadcast to [batch, kv_heads, group, queries, keys of the range].
    """
    causal = position[start:stop, None] < position[None, start:end]
    if mask is None:
        hidden = [(slice(past + start, past + end), causal)]
    else:
        hidden = [(slice(past, past + end), ~mask[:, :, None, start:stop, :end])]
    if past_valid is not None:
        hidden.append((slice(0, past), ~past_valid[:, :, None, None]))
    if valid is not None:
        hidden.append((slice(past, past + end), ~valid[:, None, None, None, :end]))
        hidden.append((slice(0, past + end), ~valid[:, None, None, start:stop, None]))
    return hidden


def _softmax(logits: Tensor, hidden: list[tuple[slice, Tensor]], sink: Tensor | None) -> Tensor:
    """Returns the softmax over visible keys, without the sink's share; zeros if all keys are hidden.

    Args:
        logits: logits, [batch, kv_heads, group, queries, keys], overwritten.
        hidden: result of `_hidden`.
        sink: sink logits, [1, kv_heads, group, 1, 1], or None.
    """
    for keys, mask in hidden:
        logits[..., keys].masked_fill_(mask, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    if sink is not None:
        peak = torch.maximum(peak, sink)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = logits.sub_(peak).clamp_(min=LOWEST_LOGIT).exp_()
    for keys, mask in hidden:
        weights[..., keys].masked_fill_(mask, 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    return weights.div_(torch.where(total == 0, 1.0, total))


def observation(valid: Tensor | None, batch: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a mask of the queries that score, bool [batch, Q]."""
    real = torch.ones(batch, length, dtype=torch.bool, device=device) if valid is None else valid
    return real if window is None else real & (_later(real) < window)


def _later(real: Tensor) -> Tensor:
    """Returns the number of True entries after each position, [batch, Q]."""
    return real.flip(-1).cumsum(-1).flip(-1) - real.long()


def scale_up(received: Tensor, past: int, valid: Tensor | None, window: int) -> None:
    """Scales sums over the last `window` queries up to all later queries, in place.

    Args:
        received: received attention, [batch, kv_heads, past + Q].
        past: number of tokens that precede every query.
        valid: True for real tokens, bool [batch, Q]; None if all are.
        window: number of real queries at the end that scored.
    """
    batch, length, device = received.shape[0], received.shape[-1] - past, received.device
    real, observed = (observation(valid, batch, length, most, device) for most in (None, window))
    counted = _later(observed)
    weight = torch.where(counted > 0, _later(real).double() / counted.clamp(min=1), 0.0)
    received[..., past:] *= weight[:, None]
    real = real.sum(-1)
    received[..., :past] *= (real.double() / real.clamp(min=1, max=window))[:, None, None].to(received.dtype)


def dense_tokens(past: EarlierTokens) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the keys and values before the new tokens, and a mask of those that exist; None without any.

    Keys and values are [batch, kv_heads, tokens, dim], the mask is bool [batch, kv_heads, tokens]. Stored tokens are
    ordered by rank, in float32 (float64 for float64 models), and padded with zeros.
    """
    parts = [_decoded(past.rows, past.stored)] if past.stored else []
    if past.exact:
        parts.append((past.key, past.value, past.valid))
    if len(parts) < 2:
        return parts[0] if parts else None
    dtype = torch.promote_types(parts[0][0].dtype, past.key.dtype)
    key, value = (torch.cat([part[i].to(dtype) for part in parts], dim=2) for i in (0, 1))
    return key, value, torch.cat([part[2] for part in parts], dim=2)


def _decoded(rows: LayerRows, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, kv_heads = rows.batch, rows.heads
    device, dtype = rows.device, rows.dtype
    tiers = rows.tiers
    shape = (rows.count, longest)
    key = torch.zeros(*shape, tiers[HIGH].key_dim, dtype=compute_dtype(dtype), device=device)
    value = torch.zeros(*shape, tiers[HIGH].value_dim, dtype=compute_dtype(dtype), device=device)
    before = torch.zeros(rows.count, dtype=torch.int64, device=device)
    for tier in (HIGH, LOW):
        count = rows.counts[tier].view(-1).long()
        tokens = stored_tokens(rows, tier)
        rank = before[tokens.row] + tokens.index
        parts = ops_for_rows(rows).load_tokens(rows.pages, tiers[tier], tokens.page, tokens.slot, dtype)
        key[tokens.row, rank], value[tokens.row, rank] = (part.to(key.dtype) for part in parts)
        before = before + count
    place = held_tokens(rows.window_start, rows.length, rows.sink_end, rows.sink_slots, rows.slots)
    held = (place >= 0).sum(1).repeat_interleave(kv_heads)
    # slots in the order of their tokens, empty ones last
    order = torch.where(place < 0, torch.iinfo(place.dtype).max, place).argsort(1)
    order = order.repeat_interleave(kv_heads, dim=0)
    row, index = (torch.arange(rows.slots, device=device) < held[:, None]).nonzero(as_tuple=True)
    slot, rank = order[row, index], before[row] + index
    key[row, rank] = rows.window_key.flatten(0, 1)[row, slot].to(key.dtype)
    value[row, rank] = rows.window_value.flatten(0, 1)[row, slot].to(value.dtype)
    valid = torch.arange(longest, device=device) < (before + held)[:, None]
    return tuple(part.unflatten(0, (batch, kv_heads)) for part in (key, value, valid))
