"""Launcher of the prompt attention kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import e, log2

import torch
import triton
from torch import Tensor

from ...pages import EarlierTokens
from ...pages.rows import NO_PAST
from ..backend import device_of
from ..quantize.launch import TRITON_DTYPES, dot_dtype, unit_stride
from ..softmax import Softmax
from .columns import column_scores
from .kernels import flash_forward, row_extents
from .past_launch import check_past, heads_per_program, past_state, score_past
from .tiles import column_tile, extent_block, forward_tile, padded, strides

# programs along the second and third axis of a launch
LARGEST_GRID = 65535


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
    """Exact causal attention of Q new tokens over a past of P stored tokens and themselves; see the reference.

    The output [batch, query_heads, Q, value_dim] lies in memory as [batch, Q, query_heads, value_dim]; received
    [batch, kv_heads, P + Q] is float32. The last dimension of inputs should be contiguous, or it is copied. Nothing is
    copied to the host.
    """
    stored, dense, sinks = past.stored, past.exact, softmax.sinks
    given = {"valid": valid, "mask": mask, "sinks": sinks}
    given |= {"past_key": past.key, "past_value": past.value, "past_valid": past.valid} if dense else {}
    _check(query, key, value, softmax, **given)
    if past.rows is not None:
        check_past(past.rows, query, key.shape[1], value.shape[-1])
    if observed is not None and observed < 0:
        raise ValueError(f"observed must be at least 0, not {observed}.")
    batch, query_heads, length, key_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    device = query.device
    output = torch.empty(batch, length, query_heads, value_dim, dtype=query.dtype, device=device).transpose(1, 2)
    received = lse = None
    if observed != 0:
        received = torch.zeros(batch, kv_heads, stored + dense + length, dtype=torch.float32, device=device)
        lse = torch.empty(batch, query_heads, length, dtype=torch.float32, device=device)
    if batch == 0 or length == 0:
        return output, received
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    scale, cap = logit_factors(softmax.scaling, softmax.softcap)
    target = device_of(device).target
    with _on(device):
        extents = behind = past_extents = past_key = past_value = past_valid = None
        if valid is not None:
            valid = valid.contiguous().view(torch.uint8)
            extents, behind = row_extents_of(valid, observed or None)
        if dense:
            past_key, past_value = past.key.contiguous(), past.value.contiguous()
            past_valid = past.valid.contiguous().view(torch.uint8).view(batch * kv_heads, dense)
            past_extents, _ = row_extents_of(past_valid, None)
        allowed, allowed_strides = None, (0, 0)
        if mask is not None:
            allowed = unit_stride(mask).view(torch.uint8)
            allowed_strides = (allowed.stride(0) if allowed.shape[0] > 1 else 0, allowed.stride(2))
        common = dict(query=query, extents=extents, length=length, group=query_heads // kv_heads, scale=scale, cap=cap)
        common |= strides("query", query)
        partials = None
        if stored:
            partials = past_state(past.rows, stored, common, target)
        tile = forward_tile(target, query.dtype, key_dim, value_dim, masked=mask is not None)
        flash_forward[(triton.cdiv(length, tile.block_m), query_heads, batch)](
            key=key,
            value=value,
            past_key=past_key,
            past_value=past_value,
            past_valid=past_valid,
            past_extents=past_extents,
            past_length=dense,
            partial_output=None if partials is None else partials.output,
            partial_peak=None if partials is None else partials.peak,
            partial_total=None if partials is None else partials.total,
            splits=0 if partials is None else partials.splits,
            output=output,
            lse=lse,
            valid=valid,
            allowed=allowed,
            sinks=None if sinks is None else sinks.contiguous(),
            **strides("key", key),
            **strides("value", value),
            **strides("output", output),
            allowed_batch=allowed_strides[0],
            allowed_query=allowed_strides[1],
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_WIDTH=padded(key_dim),
            VALUE_WIDTH=padded(value_dim),
            DOT=dot_dtype(query.dtype, target),
            **common,
            **tile.options(),
        )
        if observed == 0:
            return output, None
        # its memory may serve what follows
        del partials

        tile = column_tile(target, query.dtype, key_dim)
        common |= dict(lse=lse, received=received, received_length=stored + dense + length, kv_heads=kv_heads)
        common |= dict(window=observed, WINDOW=observed is not None)
        common |= tile.options()
        if stored:
            score_past(past.rows, stored, common, target)
        for keys, before in ((past_key, True), (key, False)):
            if before and not dense:
                continue
            blocks = triton.cdiv(keys.shape[2], tile.block_n)
            heads = heads_per_program(blocks * kv_heads * batch, query_heads // kv_heads)
            column_scores[(blocks, query_heads // heads, batch)](
                key=keys,
                key_valid=past_valid if before else valid,
                key_extents=past_extents if before else None,
                behind=behind,
                allowed=None if before else allowed,
                key_length=keys.shape[2],
                received_offset=stored if before else stored + dense,
                heads=heads,
                **strides("key", keys),
                allowed_batch=allowed_strides[0],
                allowed_query=allowed_strides[1],
                KEY_DIM=key_dim,
                KEY_WIDTH=padded(key_dim),
                DOT=dot_dtype(query.dtype, target),
                PAST=before,
                **common,
            )
    return output, received


def logit_factors(scaling: float, softcap: float | None) -> tuple[float, float | None]:
    """(scale, cap) with which the kernels turn q . k into a logit in units of log2.

    Without capping that is scale * (q . k). With it, softcap * tanh(scaling * (q . k) / softcap), where the kernels
    take tanh(x / 2) as 1 - 2 / (exp(x) + 1): scale yields x * log2(e) and cap is softcap * log2(e).
    """
    if softcap is None:
        return scaling * log2(e), None
    return 2 * scaling * log2(e) / softcap, softcap * log2(e)


def row_extents_of(valid: Tensor, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Launches `row_extents` over uint8 [rows, length]: extents int32 [rows, 4], and `behind` if there is a window."""
    rows, length = valid.shape
    extents = torch.empty(rows, 4, dtype=torch.int32, device=valid.device)
    behind = None if window is None else torch.empty(rows, length, dtype=torch.int32, device=valid.device)
    row_extents[(rows,)](
        valid=valid,
        extents=extents,
        behind=behind,
        length=length,
        window=window,
        WINDOW=window is not None,
        BLOCK=extent_block(length),
        num_warps=4,
    )
    return extents, behind


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device, which need not be where a layer lives."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, **given: Tensor | None) -> None:
    """Raises `ValueError` for what the kernels cannot take; `given` are further tensors by name."""
    if query.dtype not in TRITON_DTYPES:
        raise ValueError(f"the kernels support {list(TRITON_DTYPES)}, not {query.dtype}; use the reference.")
    batch, query_heads, length, key_dim = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    if batch * kv_heads > LARGEST_GRID:
        raise ValueError(f"{batch} sequences of {kv_heads} KV heads are more than {LARGEST_GRID}; use a smaller batch.")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads.")
    if softmax.scaling <= 0:
        raise ValueError(f"scaling must be positive, not {softmax.scaling}.")
    before = given["past_key"].shape[2] if "past_key" in given else 0
    shapes = {
        "key": (batch, kv_heads, length, key_dim),
        "value": (batch, kv_heads, length, value_dim),
        "valid": (batch, length),
        "mask": (batch, 1, length, length),
        "sinks": (query_heads,),
        "past_key": (batch, kv_heads, before, key_dim),
        "past_value": (batch, kv_heads, before, value_dim),
        "past_valid": (batch, kv_heads, before),
    }
    for name, tensor in {"key": key, "value": value, **given}.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"{name} must be {list(shapes[name])}, not {list(tensor.shape)}.")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, the query on {query.device}.")
        if name in ("valid", "mask", "past_valid") and tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, not {tensor.dtype}.")
