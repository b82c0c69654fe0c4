"""Launchers of the prompt attention kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...pages import EarlierTokens, LayerRows
from ...pages.rows import NO_PAST
from .. import backend
from ..backend import KERNELS, device_of, launch, row_arguments, unit_stride
from ..decode_attention.tier_math import padded
from ..quantize.launch import TRITON_DTYPES, check_dtype, dot_dtype
from ..softmax import Softmax
from . import cpu
from .columns import column_scores, past_scores
from .kernels import flash_forward, row_extents
from .past_kernel import past_forward
from .tiles import (
    Tile,
    column_tile,
    extent_block,
    forward_tile,
    past_constants,
    past_dot,
    past_tile,
    strides,
    value_width,
)

# tiles of wider heads would not fit in a GPU's registers; PyTorch handles those heads
KERNEL_HEAD_DIM = 512
# most programs along the second or third axis of a launch
LARGEST_GRID = 65535
# programs that fill a large device several times
MANY_PROGRAMS = 1024
PROGRAMS_PER_PROCESSOR = 4
# minimum length of a split
MIN_SPLIT_TOKENS = 512
MAX_PAST_SPLITS = 64


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
    """Attends from Q new tokens over a past of P tokens and themselves; arguments and results as in the reference.

    The output [batch, query_heads, Q, value_dim] is laid out in memory as [batch, Q, query_heads, value_dim]. The
    received attention [batch, kv_heads, P + Q] is float32. Inputs are copied if their last dimension is not contiguous.
    Nothing is copied to the host.

    Raises:
        ValueError: kernels do not support the arguments, or heads are too wide and `use_backend` forces the kernels.
    """
    widest = max(key.shape[-1], value.shape[-1])
    if widest > KERNEL_HEAD_DIM:
        if backend.forced == KERNELS:
            raise ValueError(f"the kernels take head dimensions up to {KERNEL_HEAD_DIM}, not {widest}.")
        options = {"past": past, "valid": valid, "mask": mask, "observed": observed}
        return cpu.prefill_attention(query, key, value, softmax, **options)
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
    scale, cap = softmax.factors()
    target = device_of(device).target
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
    common = {
        "query": query,
        "extents": extents,
        "behind": behind,
        "lse": lse,
        "received": received,
        "received_length": stored + dense + length,
        "length": length,
        "kv_heads": kv_heads,
        "group": query_heads // kv_heads,
        "scale": scale,
        "cap": cap,
        "window": observed,
        "allowed_batch": allowed_strides[0],
        "allowed_query": allowed_strides[1],
        **strides("query", query),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_WIDTH": padded(key_dim),
        "VALUE_WIDTH": value_width(key_dim, value_dim),
        "DOT": dot_dtype(query.dtype, target),
        "WINDOW": observed is not None,
    }
    partials = {"partial_output": None, "partial_peak": None, "partial_total": None, "splits": 0}
    if stored:
        partials = past_state(past.rows, stored, common, target)
    tile = forward_tile(target, query.dtype, key_dim, value_dim, masked=mask is not None)
    launch(
        flash_forward,
        (triton.cdiv(length, tile.block_m), query_heads, batch),
        device,
        common,
        key=key,
        value=value,
        past_key=past_key,
        past_value=past_value,
        past_valid=past_valid,
        past_extents=past_extents,
        past_length=dense,
        output=output,
        valid=valid,
        allowed=allowed,
        sinks=None if sinks is None else sinks.contiguous(),
        **strides("key", key),
        **strides("value", value),
        **strides("output", output),
        **partials,
        **tile.options(),
    )
    if observed == 0:
        return output, None
    # frees the memory for the next launches
    del partials

    tile = column_tile(target, query.dtype, key_dim)
    if stored:
        score_past(past.rows, stored, common, tile, target)
    for keys, before in ((past_key, True), (key, False)):
        if before and not dense:
            continue
        blocks = triton.cdiv(keys.shape[2], tile.block_n)
        heads = heads_per_program(blocks * kv_heads * batch, query_heads // kv_heads)
        launch(
            column_scores,
            (blocks, query_heads // heads, batch),
            device,
            common,
            key=keys,
            key_valid=past_valid if before else valid,
            key_extents=past_extents if before else None,
            allowed=None if before else allowed,
            key_length=keys.shape[2],
            received_offset=stored if before else stored + dense,
            heads=heads,
            **strides("key", keys),
            PAST=before,
            **tile.options(),
        )
    return output, received


def past_state(rows: LayerRows, longest: int, common: dict[str, object], target: str) -> dict[str, object]:
    """Attends from all queries to the stored tokens; returns the splits' softmax states, as `flash_forward` takes them.

    Args:
        rows: stored tokens.
        longest: number of tokens in the longest row.
        common: arguments shared with the other launches; the query is [batch, query_heads, Q, key_dim].
        target: target of the device, see `ops/backend.py`.
    """
    query, group, kv_heads = common["query"], common["group"], common["kv_heads"]
    batch, _, length, _ = query.shape
    tile = past_tile(target, query.dtype, rows.layout)
    blocks = triton.cdiv(length * group, tile.block_m)
    splits = choose_splits(blocks * batch * kv_heads, longest, device_of(query.device).processors)

    def buffer(*shape: int) -> Tensor:
        return torch.empty(splits, batch * kv_heads, length * group, *shape, dtype=torch.float32, device=query.device)

    partials = {
        "partial_output": buffer(rows.layout.high.value_dim),
        "partial_peak": buffer(),
        "partial_total": buffer(),
        "splits": splits,
    }
    given = _stored(rows, common, target) | partials
    # converted here, because a conversion in the kernel would need more registers
    query = query.to(past_dot(rows.layout, query.dtype))
    given |= {"query": query} | strides("query", query)
    launch(past_forward, (blocks, splits, batch * kv_heads), query.device, given, **tile.options())
    return partials


def score_past(rows: LayerRows, longest: int, common: dict[str, object], tile: Tile, target: str) -> None:
    """Adds the attention that stored tokens receive to `received`.

    Arguments are as in `past_state`; `tile` is the tile of `column_scores`.
    """
    query, group = common["query"], common["group"]
    batch, query_heads = query.shape[:2]
    # each level may end in a partial block
    blocks = triton.cdiv(longest, tile.block_n) + 2
    heads = heads_per_program(blocks * batch * common["kv_heads"], group)
    given = _stored(rows, common, target)
    grid = (blocks, query_heads // heads, batch)
    launch(past_scores, grid, query.device, given, heads=heads, DOT=common["DOT"], **tile.options())


def heads_per_program(programs: int, group: int) -> int:
    """Returns the number of query heads per scoring program: the whole group if that leaves enough programs.

    A program for the whole group loads keys only once.
    """
    return group if programs >= MANY_PROGRAMS else 1


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Returns the number of splits of stored tokens that fills a device of `processors`, without short splits."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)
    return max(1, min(wanted, tokens // MIN_SPLIT_TOKENS, MAX_PAST_SPLITS))


def check_past(rows: LayerRows, query: Tensor, kv_heads: int, value_dim: int) -> None:
    """Raises `ValueError` if these queries cannot attend to the stored tokens."""
    if rows.dtype not in TRITON_DTYPES:
        raise ValueError(f"window_key must be one of {list(TRITON_DTYPES)}, not {rows.dtype}.")
    stored, needed = (rows.batch, rows.heads), (query.shape[0], kv_heads)
    if stored != needed:
        raise ValueError(f"the stored tokens have (requests, KV heads) {stored}, the new tokens have {needed}.")
    stored, needed = (rows.layout.high.key_dim, rows.layout.high.value_dim), (query.shape[-1], value_dim)
    if stored != needed:
        raise ValueError(f"the stored tokens have head dimensions {stored}, the new tokens have {needed}.")
    if rows.device != query.device:
        raise ValueError(f"the stored tokens are on {rows.device}, the query on {query.device}.")


def row_extents_of(valid: Tensor, window: int | None) -> tuple[Tensor, Tensor | None]:
    """Launches `row_extents` over uint8 [rows, length].

    Returns the extents, int32 [rows, 4], and `behind`, int32 [rows, length], or None without a window.
    """
    rows, length = valid.shape
    extents = torch.empty(rows, 4, dtype=torch.int32, device=valid.device)
    behind = None if window is None else torch.empty(rows, length, dtype=torch.int32, device=valid.device)
    given = {"valid": valid, "extents": extents, "behind": behind, "length": length, "window": window}
    constants = {"WINDOW": window is not None, "BLOCK": extent_block(length), "num_warps": 4}
    launch(row_extents, (rows,), valid.device, given, **constants)
    return extents, behind


def _check(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, **given: Tensor | None) -> None:
    """Raises `ValueError` for arguments that the kernels do not support; `given` holds other tensors by name."""
    check_dtype(query.dtype)
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


def _stored(rows: LayerRows, common: dict[str, object], target: str) -> dict[str, object]:
    """Returns the arguments of kernels that read stored tokens; `length` is the number of new tokens."""
    constants = past_constants(rows.layout, common["query"].dtype, target)
    return row_arguments(rows) | common | constants | {"past_length": rows.length}
