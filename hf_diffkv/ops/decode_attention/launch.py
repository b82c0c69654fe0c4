"""Launcher of the decode attention kernels."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import takes_latents
from ..quantize.launch import check_dtype
from ..softmax import SharedAttention, Softmax
from ..tiles import Bounds
from .finish_kernel import finish_kernel
from .kernels import attend_kernel
from .latent_kernel import latent_kernel
from .scratch import Scratch, is_absorbed
from .splits import MIN_BLOCKS

# splits merged at once; the second number applies if there are more, since loads would wait for each other
SPLIT_BLOCKS = (16, 64)
# tokens whose scores a program adds at a time; each tier and the window may end in a partial tile
SHARE_TOKENS = 512
# more programs gain nothing, and most would find no tokens if rows are shorter than planned
MOST_SHARES = 8192
FINISH_WARPS = 4
# arguments of `attend_kernel` for scores, which latents lack
SCORE_ARGUMENTS = ("logits", "block_peak", "positions", "blocks")


def decode_attention(
    query: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    bounds: Bounds,
    valid: Tensor | None = None,
    scratch: Scratch | None = None,
    held: SharedAttention | None = None,
) -> Tensor:
    """Attends from the newest token of every request; other arguments are as in the reference.

    Nothing is read back from the device. One program serves all query heads of a KV head, or a block of them if queries
    are absorbed. Rows are split along the sequence until the device is full.

    Args:
        softmax: softmax parameters; the scaling must be positive.
        scratch: buffers from an earlier call; None allocates new ones. CUDA graphs need fixed buffers.

    Returns:
        Attention output, [batch, query_heads, value_dim] in the query's dtype.
    """
    layout = rows.layout
    _check_query(query, rows, softmax.scaling)
    query_heads = query.shape[1]
    group = query_heads // rows.heads
    max_tokens = max(int(bounds.max_tokens), 1)
    if scratch is None:
        scratch = Scratch.allocate(query, rows, max_tokens)
    scratch.check(rows, group, max_tokens)
    config = scratch.config
    output = torch.empty(rows.batch, query_heads, layout.high.value_dim, dtype=query.dtype, device=query.device)
    if rows.count == 0:
        return output
    if valid is not None:
        valid = valid.to(torch.bool).contiguous().view(torch.uint8)
    logit_scale, cap = softmax.factors()
    shared = {
        "pages": rows.pages,
        "page_table": rows.page_table,
        "high_count": rows.high_count,
        "low_count": rows.low_count,
        "window_start": rows.window_start,
        "length": rows.length,
        "valid": valid,
        "sink_end": rows.sink_end,
        "partial_output": scratch.output,
        "partial_peak": scratch.peak,
        "partial_total": scratch.total,
        "logits": scratch.logits,
        "block_peak": scratch.block_peak,
        "table_width": rows.width,
        "kv_heads": rows.heads,
        "slots": rows.slots,
        "sink_slots": rows.sink_slots,
        "splits": scratch.splits,
        "positions": scratch.logits.shape[1] if layout.selects else 0,
        "blocks": scratch.block_peak.shape[1] if layout.selects else 0,
        "HIGH": layout.high,
        "LOW": layout.low,
        "GROUP": group,
        "HEADS": config.heads,
        "BLOCK": config.block,
    }
    attending = {
        "query": query.contiguous(),
        "window_key": rows.window_key,
        "window_value": rows.window_value,
        "logit_scale": logit_scale,
        "cap": cap,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **dict(config.options),
        "MIN_BLOCKS": MIN_BLOCKS,
        "OPERAND": config.operand,
        "RAW": config.raw,
        "MODE": config.mode,
        "ONE_TIER": layout.one_tier,
    }
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        if is_absorbed(query, layout):
            unscored = {name: value for name, value in shared.items() if name not in SCORE_ARGUMENTS}
            blocks_of_heads = triton.cdiv(group, config.heads)
            latent_kernel[(rows.count, blocks_of_heads, scratch.splits)](**attending, **unscored)
        else:
            attend_kernel[(rows.count, scratch.splits)](**attending, **shared)
        joining = _joining(held, scratch.logits)
        shares = _shares(rows.count, scratch) if layout.selects else 0
        finish_kernel[(rows.count, group + shares)](
            window_score=rows.window_score,
            held=None if held is None else held.received,
            sinks=None if softmax.sinks is None else softmax.sinks.contiguous(),
            output=output,
            shares=shares,
            SPLIT_BLOCK=SPLIT_BLOCKS[0] if scratch.splits <= SPLIT_BLOCKS[0] else SPLIT_BLOCKS[1],
            LANES=triton.next_power_of_2(layout.high.value_dim),
            TOKENS=SHARE_TOKENS,
            num_warps=FINISH_WARPS,
            **shared,
            **joining,
        )
    return output


def _shares(rows: int, scratch: Scratch) -> int:
    """Returns the number of programs that add the scores of a row."""
    most = max(scratch.splits, triton.cdiv(MOST_SHARES, rows))
    return min(triton.cdiv(scratch.max_tokens, SHARE_TOKENS) + 2, most)


def _joining(held: SharedAttention | None, logits: Tensor | None) -> dict[str, bool]:
    """Returns the constants for joining scores over several layers; creates the buffer for the first layer."""
    if held is None or logits is None:
        return {"FOLD": False, "HOLD": False}
    fold = held.received is not None
    if not fold:
        held.received = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    if held.received.shape != logits.shape[:2]:
        raise ValueError(
            f"held {tuple(held.received.shape)} belongs to another step; it must be {tuple(logits.shape[:2])}."
        )
    return {"FOLD": fold, "HOLD": not held.last}


def _check_query(query: Tensor, rows: LayerRows, scaling: float) -> None:
    check_dtype(query.dtype)
    # rows stored at 16 bits are read in the query's dtype
    if query.dtype != rows.dtype:
        raise ValueError(f"query is {query.dtype} but the stored tokens are {rows.dtype}; convert the query.")
    key_dim, value_dim = rows.layout.high.key_dim, rows.layout.high.value_dim
    fitting = query.ndim == 3 and query.shape[0] == rows.batch and query.shape[1] % rows.heads == 0
    if not fitting or query.shape[2] not in (key_dim, key_dim + value_dim):
        raise ValueError(
            f"query {tuple(query.shape)} must be [{rows.batch}, a multiple of {rows.heads} KV heads, {key_dim}], or "
            f"{key_dim + value_dim} if it is absorbed."
        )
    if query.shape[2] != key_dim and not takes_latents(rows.layout):
        raise ValueError(
            "the kernels take absorbed queries only for pages without scores, and latents of a multiple of 4 elements, "
            "up to 512, with 2 bits or more and 1, 2 or 4 groups; use the reference."
        )
    if not scaling > 0:
        raise ValueError(f"scaling={scaling} must be positive.")
