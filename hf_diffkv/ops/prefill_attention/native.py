"""Prompt attention in native code: one pass over queries and keys gives the output and the received attention."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...native.library import DTYPES, MAX_DIM, Prompt, Strided, address, call, library, step_block, unit_stride
from ...pages import EarlierTokens, LayerRows
from ...pages.rows import NO_PAST
from ..softmax import Softmax
from .reference import scale_up


def can_attend(query: Tensor, value: Tensor) -> bool:
    """Returns whether native code supports these queries and values."""
    narrow = max(query.shape[-1], value.shape[-1]) <= MAX_DIM
    return query.device.type == "cpu" and query.dtype in DTYPES and narrow and library() is not None


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
    """Attends from new tokens; arguments and results as in the reference.

    Stored tokens are read from their pages. For bfloat16 models, stored tokens and the weights of values may be rounded
    to bfloat16.

    Raises:
        ValueError: shapes or dtypes of tensors do not fit.
        CorruptMemoryError: a table entry is not a page, or counts do not fit the table.
    """
    batch, query_heads, length, key_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    _check(query, key, value, past.rows)
    stored, before = past.stored, past.exact
    # the memory layout that models expect
    output = torch.zeros(batch, length, query_heads, value_dim, dtype=query.dtype, device=query.device)
    received = (
        torch.zeros(batch, kv_heads, stored + before + length, dtype=torch.float32, device="cpu")
        if observed != 0
        else None
    )
    block = Prompt(batch=batch, heads=kv_heads, group=query_heads // kv_heads, length=length, before=before)
    block.stored_tokens, block.key_dim, block.value_dim = stored, key_dim, value_dim
    given = {"query": query, "key": key, "value": value}
    if before:
        given |= {"past_key": past.key, "past_value": past.value}
    given = {name: unit_stride(tensor.to(query.dtype)) for name, tensor in given.items()}
    for name, tensor in given.items():
        setattr(block, name, Strided(address(tensor), *tensor.stride()[:3]))
    flags = {"valid": valid, "past_valid": past.valid if before else None}
    flags = {name: None if flag is None else flag.to(torch.bool).contiguous() for name, flag in flags.items()}
    block.valid, block.past_valid = address(flags["valid"]), address(flags["past_valid"])
    if mask is not None:
        mask = mask.expand(batch, 1, length, length)
        mask = mask if mask.stride()[2:] == (length, 1) else mask.contiguous()
        block.mask, block.mask_batch = address(mask), mask.stride(0)
    sinks = None if softmax.sinks is None else softmax.sinks.float().contiguous()
    block.sinks, block.output, block.received = address(sinks), address(output), address(received)
    block.scaling, block.softcap = softmax.scaling, softmax.softcap or 0.0
    block.observed = observed or length
    block.dtype, block.threads = DTYPES[query.dtype], torch.get_num_threads()
    step = step_block(past.rows) if stored else None
    if step is not None:
        block.stored = ctypes.addressof(step)
    call("prompt", block)
    if observed:
        scale_up(received, stored + before, valid, observed)
    return output.transpose(1, 2), received


def _check(query: Tensor, key: Tensor, value: Tensor, rows: LayerRows | None) -> None:
    batch, query_heads, length, key_dim = query.shape
    kv_heads = key.shape[1]
    if key.shape != (batch, kv_heads, length, key_dim) or query_heads % kv_heads:
        raise ValueError(f"key {tuple(key.shape)} does not match the query {tuple(query.shape)}.")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value {tuple(value.shape)} does not match the key {tuple(key.shape)}.")
    if rows is not None and (rows.layout.high.key_dim, rows.layout.high.value_dim) != (key_dim, value.shape[-1]):
        raise ValueError(
            f"the stored tokens have other dimensions than the key's {key_dim} and the value's {value.shape[-1]}."
        )
