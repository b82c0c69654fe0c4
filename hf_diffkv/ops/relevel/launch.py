"""Launcher of the kernels by which rows are levelled anew: at most ten launches, no read of the device."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import Precision
from ...memory import FreeList, PageLayout, TierLayout
from ..enter.launch import ROUNDING_WARPS, few_tokens, fix_offsets, strides
from ..quantize.launch import TRITON_DTYPES, check_dtype, check_pages, padded_width, unit_stride
from ..rotation_kernel import INNER, NUM_WARPS, root
from ..variant import KernelVariant
from .kernels import count_kernel, decide_kernel
from .move_kernels import close_kernel, demote_kernel
from .plan_kernels import finish_kernel, list_kernel
from .rows import LevelledRows
from .token_kernels import level_new_kernel, level_window_kernel

# tokens that are levelled and ranked at a time, and rows, blocks or pages that are counted so
BLOCK, CHUNK = 256, 128
# of the paper, section 4.1
PRECISIONS = ((Precision(8, 4), Precision(4, 2)),)
DIMS = (64, 128)


def relevel_tokens(
    rows: LevelledRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    *,
    received: Tensor,
    rank: Tensor | None,
    count: Tensor | None,
    window: int,
    limit: float,
    key_rotation: Tensor | None,
    value_rotation: Tensor | None,
    centers: bool,
    feedback: Tensor | None,
    pin: tuple[int, int],
    pinned_sum: float,
) -> None:
    """Arguments as in the op."""
    check_dtype(key.dtype)
    check_pages(pages, layout.high)
    rows.check(key, value)
    batch, heads, tokens, _ = key.shape
    rows.check_received(received, tokens)
    many, width, columns = batch * heads, rows.page_table.shape[2], received.shape[2]
    if tokens == 0 or many == 0:
        return
    past = columns - tokens
    key, value = unit_stride(key), unit_stride(value)
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
    entering = {"count": count, "heads": heads, "tokens": tokens, "window": window}
    slots = {"slots": rows.window_key.shape[2], "sink_slots": rows.sink_slots}
    pinned = {"pin_start": pin[0], "pin_stop": pin[1], "pinned_sum": pinned_sum}
    tiers = {"HIGH": layout.high, "LOW": layout.low, "num_warps": NUM_WARPS}
    found = {"plan": plan, "order": order, "level": level, "target": target, "entries": entries, "past": past}
    found |= {"columns": columns, **counts, **sizes}
    held = {"window_key": rows.window_key, "window_value": rows.window_value, "window_score": rows.window_score}
    block = few_tokens(max(layout.high.key_dim, layout.high.value_dim))
    tiles = tiers | {"DTYPE": TRITON_DTYPES[key.dtype], "BLOCK": block}
    tiles["num_warps"] = NUM_WARPS if feedback is None else ROUNDING_WARPS
    both = tiles | widths("HIGH_", layout.high) | widths("LOW_", layout.low)
    shift = torch.empty_like(rows.key_offset) if centers else None
    received = received.contiguous()
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        if centers:
            fix_offsets(rows, key, key_rotation, rank, shift, entering | lengths | slots)
        decide_kernel[(many, blocks)](
            pages,
            rows.page_table,
            alpha_high=rows.alpha_high,
            alpha_low=rows.alpha_low,
            window_score=rows.window_score,
            received=received,
            rank=rank,
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
        free = {"ring_state": ring_state, "state": free_list.state}
        count_kernel[(many,)](plan=plan, rows=many, **counted, **free, **counts, **tiers)
        list_kernel[(many, blocks + 1)](
            free_list.ring, ring_state, rows.page_table, BLOCK=BLOCK, **counted, **found, **tiers
        )
        if past:
            grid = (many, triton.cdiv(past, block))
            demote_kernel[grid](pages, feedback=feedback, **found, **tiles, **widths("", layout.low))
            close_kernel[grid](pages, HIGH=layout.high, BLOCK=block, num_warps=NUM_WARPS, **found)
            level_window_kernel[(many, triton.cdiv(slots["slots"], block))](
                pages, shift=shift, feedback=feedback, heads=heads, **held, **lengths, **slots, **found, **both
            )
        level_new_kernel[(many, triton.cdiv(tokens, block))](
            pages,
            invalid=rows.invalid.view(torch.uint8),
            key=key,
            value=value,
            received=received,
            rank=rank,
            key_matrix=key_rotation,
            value_matrix=value_rotation,
            offset=rows.key_offset if rows.key_offset.shape[2] else None,
            feedback=feedback,
            limit=limit,
            **strides("key", key),
            **strides("value", value),
            KEY_ROOT=root(layout.high.key_dim),
            VALUE_ROOT=root(layout.high.value_dim),
            INNER=INNER,
            OPERAND=tiles["DTYPE"] if pages.is_cuda else tl.float32,
            **held,
            **lengths,
            **entering,
            **slots,
            **pinned,
            **found,
            **both,
        )
        finish_kernel[(many,)](
            free_list.ring,
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


def widths(name: str, tier: TierLayout) -> dict[str, int]:
    return {
        f"{name}KEY_WIDTH": padded_width(tier.key_dim, tier.k_bits),
        f"{name}VALUE_WIDTH": padded_width(tier.value_dim, tier.v_bits),
    }


def variants() -> list[KernelVariant]:
    """What the ahead-of-time report compiles: bf16 models, the paper's configuration, and keys rotated, centred and
    rounded for their queries."""
    found = []
    for (high, low), dim in itertools.product(PRECISIONS, DIMS):
        for transforms in (False, True):
            found += _variants(high, low, dim, transforms)
    return found


def _variants(high: Precision, low: Precision, dim: int, transforms: bool) -> list[KernelVariant]:
    """Of one page format: wide, of the model's own channels; or narrow, of transformed ones."""
    numbers = {"metadata_bits": 16, "position_bytes": 2} if transforms else {}
    layout = PageLayout.build(high, low, dim, dim, 2, **numbers)
    ints = ("rows", "heads", "width", "columns", "past", "tokens", "window", "slots", "sink_slots", "blocks")
    ints += tuple(f"{name}_{part}" for name in ("key", "value") for part in ("batch", "head", "token"))
    types = {
        **dict.fromkeys(("pages", "invalid"), "*u8"),
        "level": "*i8",
        **dict.fromkeys(("window_key", "window_value", "key", "value"), "*bf16"),
        **dict.fromkeys(("window_score", "received", "alpha_high", "alpha_low"), "*fp32"),
        **dict.fromkeys(("key_matrix", "value_matrix", "offset", "shift", "feedback"), "*fp32"),
        **dict.fromkeys(("length", "window_start", "sink_end", "state", "ring_state"), "*i64"),
        **dict.fromkeys(("ring", "table", "high_count", "low_count", "before", "plan", "order", "target"), "*i32"),
        "entries": "*i32",
        **dict.fromkeys((*ints, "pin_start", "pin_stop"), "i32"),
        **dict.fromkeys(("limit", "pinned_sum"), "fp32"),
    }
    absent = dict.fromkeys(("rank", "count"))
    if not transforms:
        absent |= dict.fromkeys(("key_matrix", "value_matrix", "offset", "shift", "feedback"))
    tile = {"HIGH": layout.high, "LOW": layout.low, "DTYPE": tl.bfloat16, "BLOCK": few_tokens(dim)}
    product = {"KEY_ROOT": root(dim), "VALUE_ROOT": root(dim), "INNER": INNER, "OPERAND": tl.bfloat16}
    tile |= product | widths("HIGH_", layout.high) | widths("LOW_", layout.low)
    counting = {"HIGH": layout.high, "LOW": layout.low, "BLOCK": BLOCK, "CHUNK": CHUNK}
    kernels = dict.fromkeys((level_window_kernel, level_new_kernel), tile)
    kernels[demote_kernel] = tile | widths("", layout.low)
    kernels[decide_kernel] = counting
    if not transforms:
        kernels |= dict.fromkeys((count_kernel, list_kernel, finish_kernel), counting) | {close_kernel: tile}
    name = f"{high.name}-{low.name}{'-rotated' if transforms else ''}-d{dim}"
    found = []
    for kernel, constants in kernels.items():
        constants = {each: value for each, value in (absent | constants).items() if each in kernel.arg_names}
        signature = {each: types[each] for each in kernel.arg_names if each not in constants}
        found.append(
            KernelVariant(
                name=f"{kernel.__name__.removesuffix('_kernel')}-{name}",
                kernel=kernel,
                signature=signature,
                constexprs=constants,
                num_warps=ROUNDING_WARPS if "feedback" in signature else NUM_WARPS,
            )
        )
    return found
