"""Launcher of the decode attention kernels."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...pages import PageLayout
from .finish_kernel import finish_kernel
from .held import Held
from .kernels import attend_kernel
from .scratch import TRITON_DTYPES, KernelConfig, Scratch
from .splits import MIN_BLOCKS

LOG2_E = math.log2(math.e)
SPLIT_BLOCK = 16
SCORE_TOKENS = 128
FINISH_WARPS = 4


def decode_attention(
    query: Tensor,
    pages: Tensor,
    layout: PageLayout,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    window_start: Tensor,
    length: Tensor,
    *,
    scaling: float,
    max_tokens: int,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scratch: Scratch | None = None,
    held: Held | None = None,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
) -> Tensor:
    """Attention of the newest token of every request, see the reference for the other arguments.

    Nothing is read back from the device. Every query head of a KV head is served by the same program, and rows are
    split along the sequence until the device is full.

    Args:
        scaling: must be positive.
        max_tokens: bound on the stored tokens of any row, both tiers and window together; more are not supported.
        scratch: buffers of an earlier call; None allocates new ones. Fixed buffers are what a CUDA graph needs.

    Returns:
        [batch, query_heads, value_dim] in the query's dtype.
    """
    batch, kv_heads, width = page_table.shape
    query_heads = query.shape[1]
    slots = window_key.shape[2]
    high = layout.high
    _check_query(query, batch, kv_heads, high.key_dim, window_key.dtype, scaling)
    _check_in_place(pages, page_table, high_count, low_count, window_key, window_value, window_score)
    _check_shapes(layout, pages, page_table, high_count, low_count, window_key, window_value, window_score)
    group, rows = query_heads // kv_heads, batch * kv_heads
    max_tokens = max(int(max_tokens), 1)
    if scratch is None:
        scratch = Scratch.allocate(batch, kv_heads, query_heads, layout, slots, max_tokens, query.dtype, query.device)
    scratch.check(rows, group, high.value_dim, max_tokens, slots)
    config = scratch.config
    output = torch.empty(batch, query_heads, high.value_dim, dtype=query.dtype, device=query.device)
    if rows == 0:
        return output
    window_start, length = window_start.to(torch.int64), length.to(torch.int64)
    if valid is not None:
        valid = valid.to(torch.bool).contiguous().view(torch.uint8)
    logit_scale, cap = scaling * LOG2_E, None
    if softcap is not None:
        logit_scale, cap = 2 * scaling * LOG2_E / softcap, softcap * LOG2_E
    constants = kernel_constants(layout, group, config)
    shared = {
        "pages": pages,
        "page_table": page_table,
        "high_count": high_count,
        "low_count": low_count,
        "window_start": window_start,
        "length": length,
        "valid": valid,
        "sink_end": sink_end,
        "partial_output": scratch.output,
        "partial_peak": scratch.peak,
        "partial_total": scratch.total,
        "logits": scratch.logits,
        "block_peak": scratch.block_peak,
        "table_width": width,
        "kv_heads": kv_heads,
        "slots": slots,
        "sink_slots": sink_slots,
        "splits": scratch.splits,
        "positions": scratch.logits.shape[1] if layout.selects else 0,
        "blocks": scratch.block_peak.shape[1] if layout.selects else 0,
    }
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        attend_kernel[(rows, scratch.splits)](
            query=query.contiguous(),
            window_key=window_key,
            window_value=window_value,
            logit_scale=logit_scale,
            cap=cap,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **dict(config.options),
            **shared,
            **constants["attend"],
        )
        joining = _joining(held, scratch.logits) if layout.selects else {}
        finish_kernel[(rows, group + (scratch.splits if layout.selects else 0))](
            window_score=window_score,
            held=None if held is None else held.received,
            sinks=None if sinks is None else sinks.contiguous(),
            output=output,
            num_warps=FINISH_WARPS,
            **shared,
            **{**constants["finish"], **joining},
        )
    return output


def _joining(held: Held | None, logits: Tensor) -> dict[str, bool]:
    """How the scores are joined with those of other layers; makes the buffer at the first of them."""
    if held is None:
        return {}
    fold = held.received is not None
    if not fold:
        held.received = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    if held.received.shape != logits.shape[:2]:
        raise ValueError(f"held {tuple(held.received.shape)} is of another step; it must be {tuple(logits.shape[:2])}.")
    return {"FOLD": fold, "HOLD": not held.last}


def kernel_constants(layout: PageLayout, group: int, config: KernelConfig) -> dict[str, dict[str, object]]:
    """Compile-time arguments of the two kernels, "attend" and "finish"."""
    shared = {
        "HIGH": layout.high,
        "LOW": layout.low,
        "GROUP": group,
        "HEADS": config.heads,
        "BLOCK": config.block,
    }
    return {
        "attend": {
            **shared,
            "MIN_BLOCKS": MIN_BLOCKS,
            "OPERAND": config.operand,
            "RAW": config.raw,
            "MODE": config.mode,
        },
        "finish": {
            **shared,
            "LANES": triton.next_power_of_2(layout.high.value_dim),
            "SPLIT_BLOCK": SPLIT_BLOCK,
            "TOKENS": SCORE_TOKENS,
            "FOLD": False,
            "HOLD": False,
        },
    }


def _check_query(query: Tensor, batch: int, kv_heads: int, key_dim: int, dtype: torch.dtype, scaling: float) -> None:
    if query.dtype not in TRITON_DTYPES:
        raise ValueError(f"the kernels support {list(TRITON_DTYPES)}, not {query.dtype}; use the reference.")
    # rows stored at 16 bits are read as what the query is
    if query.dtype != dtype:
        raise ValueError(f"query is {query.dtype} but the stored tokens are {dtype}; convert the query.")
    if query.ndim != 3 or query.shape[0] != batch or query.shape[1] % kv_heads or query.shape[2] != key_dim:
        raise ValueError(f"query {tuple(query.shape)} must be [{batch}, a multiple of {kv_heads} KV heads, {key_dim}].")
    if not scaling > 0:
        raise ValueError(f"scaling={scaling} must be positive.")


def _check_in_place(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous; the kernels use it in place.")


def _check_shapes(
    layout: PageLayout,
    pages: Tensor,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
) -> None:
    heads = tuple(page_table.shape[:2])
    slots = window_key.shape[2]
    expected = (
        ("pages", pages, torch.uint8, (pages.shape[0], layout.page_bytes)),
        ("page_table", page_table, torch.int32, (*heads, page_table.shape[2])),
        ("high_count", high_count, torch.int32, heads),
        ("low_count", low_count, torch.int32, heads),
        ("window_key", window_key, window_key.dtype, (*heads, slots, layout.high.key_dim)),
        ("window_value", window_value, window_key.dtype, (*heads, slots, layout.high.value_dim)),
        ("window_score", window_score, torch.float32, (*heads, slots)),
    )
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}.")
