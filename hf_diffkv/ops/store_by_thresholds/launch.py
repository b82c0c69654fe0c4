"""Launcher of the kernels by which rows are levelled anew: at most ten launches, no read of the device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..prompt_tokens import Placement, PromptTokens
from ..quantize.launch import TRITON_DTYPES, check_dtype, unit_stride
from ..rotation_kernel import NUM_WARPS
from ..store_uniform.launch import ROUNDING_WARPS, few_tokens, fix_offsets, given_tokens
from .kernels import count_kernel, decide_kernel, finish_kernel, list_kernel
from .move_kernels import close_kernel, demote_kernel, level_new_kernel, level_window_kernel

# tokens that are levelled and ranked at a time, and rows, blocks or pages that are counted so
BLOCK, CHUNK = 256, 128


def store_by_thresholds(
    rows: LayerRows,
    new: PromptTokens,
    placement: Placement,
    received: Tensor,
    pin: tuple[int, int],
    pinned_sum: float,
) -> None:
    """Arguments as in the op."""
    check_dtype(rows.dtype)
    rows.check_tokens(new.key, new.value)
    tokens, columns, many = new.key.shape[2], received.shape[-1], rows.count
    if received.ndim != 3 or received.shape[:2] != (rows.batch, rows.heads) or columns < tokens:
        raise ValueError(
            f"received must be {[rows.batch, rows.heads]} and at least {tokens} columns, not {list(received.shape)}."
        )
    if tokens == 0 or many == 0:
        return
    (high, low), feedback, pages, width = rows.tiers, placement.feedback, rows.pages, rows.width
    past = columns - tokens
    new = replace(new, key=unit_stride(new.key), value=unit_stride(new.value))
    blocks = triton.cdiv(columns, BLOCK)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=pages.device)

    level, order = scratch(many, columns, dtype=torch.int8), scratch(many, columns)
    before, plan = scratch(many, blocks, 4), scratch(6, many)
    target, entries = scratch(many, past), scratch(many, 2, width)
    ring_state = scratch(3, dtype=torch.int64)
    counts = {"high_count": rows.high_count, "low_count": rows.low_count}
    sizes = {"rows": many, "width": width}
    lengths = {"length": rows.length, "window_start": rows.window_start, "sink_end": rows.sink_end}
    entering = {"count": new.count, "heads": rows.heads, "tokens": tokens, "window": placement.window}
    slots = {"slots": rows.slots, "sink_slots": rows.sink_slots}
    pinned = {"pin_start": pin[0], "pin_stop": pin[1], "pinned_sum": pinned_sum}
    tiers = {"HIGH": high, "LOW": low, "num_warps": NUM_WARPS}
    found = {"plan": plan, "order": order, "level": level, "target": target, "entries": entries, "past": past}
    found |= {"columns": columns, **counts, **sizes}
    held = {"window_key": rows.window_key, "window_value": rows.window_value, "window_score": rows.window_score}
    block = few_tokens(max(high.key_dim, high.value_dim))
    tiles = tiers | {"DTYPE": TRITON_DTYPES[rows.dtype], "BLOCK": block}
    tiles["num_warps"] = NUM_WARPS if feedback is None else ROUNDING_WARPS
    shift = None
    received = received.contiguous()
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        if placement.centers:
            shift = fix_offsets(rows, new, placement, entering | lengths | slots)
        decide_kernel[(many, blocks)](
            pages,
            rows.page_table,
            alpha_high=rows.alpha_high,
            alpha_low=rows.alpha_low,
            window_score=rows.window_score,
            received=received,
            rank=new.rank,
            level=level,
            before=before,
            width=width,
            past=past,
            BLOCK=BLOCK,
            **counts,
            **lengths,
            **entering,
            **slots,
            **pinned,
            **tiers,
        )
        counted = {"before": before, "blocks": blocks, "CHUNK": CHUNK}
        free = {"ring_state": ring_state, "state": rows.free_list.state}
        count_kernel[(many,)](plan=plan, rows=many, **counted, **free, **counts, **tiers)
        list_kernel[(many, blocks + 1)](
            rows.free_list.ring, ring_state, rows.page_table, BLOCK=BLOCK, **counted, **found, **tiers
        )
        if past:
            grid = (many, triton.cdiv(past, block))
            demote_kernel[grid](pages, feedback=feedback, **found, **tiles)
            close_kernel[grid](pages, HIGH=high, BLOCK=block, num_warps=NUM_WARPS, **found)
            level_window_kernel[(many, triton.cdiv(rows.slots, block))](
                pages, shift=shift, feedback=feedback, heads=rows.heads, **held, **lengths, **slots, **found, **tiles
            )
        level_new_kernel[(many, triton.cdiv(tokens, block))](
            pages,
            received=received,
            **given_tokens(rows, new, placement),
            **held,
            **lengths,
            **entering,
            **slots,
            **pinned,
            **found,
            **tiles,
        )
        finish_kernel[(many,)](
            rows.free_list.ring,
            table=rows.page_table,
            entries=entries,
            plan=plan,
            length=rows.length,
            window_start=rows.window_start,
            CHUNK=CHUNK,
            **free,
            **counts,
            **entering,
            **sizes,
            **tiers,
        )
