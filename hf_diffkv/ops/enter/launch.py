"""Launcher of the kernels by which many new tokens enter rows: at most six launches, no read of the device."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory import FreeList, PageLayout
from ...presets import UNIFORM_NUMBERS
from ..quantize.launch import TRITON_DTYPES, check_dtype, check_pages, padded_width, unit_stride
from ..rotation_kernel import INNER, NUM_WARPS, block_tokens, root, rotate_kernel
from ..rounding.reference import LARGEST_BITS
from ..variant import UNIFORM_DIMS, UNIFORM_PRECISIONS, KernelVariant
from .kernels import advance_kernel, take_pages_kernel
from .rows import EnteredRows
from .token_kernels import enter_kernel, fix_offsets_kernel, leave_window_kernel, sum_keys_kernel

ROWS_CHUNK = 256
SUM_TOKENS, SUM_STEPS = 32, 16
# of a tile of keys that is rounded, which takes more registers
ROUNDING_WARPS = 8


def enter_tokens(
    rows: EnteredRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    *,
    rank: Tensor | None,
    count: Tensor | None,
    window: int,
    limit: float,
    key_rotation: Tensor | None,
    value_rotation: Tensor | None,
    centers: bool,
    holds: bool,
    feedback: Tensor | None,
) -> None:
    """Arguments as in the op."""
    check_dtype(key.dtype)
    check_pages(pages, layout.high)
    rows.check(key, value)
    batch, heads, tokens, _ = key.shape
    tier = layout.high
    key, value = unit_stride(key), unit_stride(value)
    if tokens == 0 or batch * heads == 0:
        return
    sizes = {"heads": heads, "tokens": tokens, "window": window}
    state = {"count": count, "length": rows.length, "window_start": rows.window_start, "sink_end": rows.sink_end}
    slots = {"slots": rows.window_key.shape[2], "sink_slots": rows.sink_slots}
    lists = {"state": free_list.state, "high_count": rows.high_count, "rows": batch * heads}
    counting = {"PAGE_TOKENS": tier.capacity, "CHUNK": ROWS_CHUNK, "num_warps": NUM_WARPS}
    width = rows.page_table.shape[2]
    tiles = {
        "TIER": tier,
        "KEY_WIDTH": padded_width(tier.key_dim, tier.k_bits),
        "VALUE_WIDTH": padded_width(tier.value_dim, tier.v_bits),
        "DTYPE": TRITON_DTYPES[key.dtype],
        "num_warps": NUM_WARPS if feedback is None else ROUNDING_WARPS,
    }
    widest = max(tier.key_dim, tier.value_dim)
    block = block_tokens(widest) if feedback is None else few_tokens(widest)
    shift = torch.empty_like(rows.key_offset) if centers else None
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        if centers:
            fix_offsets(rows, key, key_rotation, rank, shift, sizes | state | slots)
        take_pages_kernel[(batch * heads,)](
            ring=free_list.ring, table=rows.page_table, width=width, **lists, **state, **sizes, **counting
        )
        if holds:
            leave_window_kernel[(batch * heads, triton.cdiv(slots["slots"], block))](
                pages,
                rows.page_table,
                rows.window_key,
                rows.window_value,
                shift=shift,
                feedback=feedback,
                width=width,
                BLOCK=block,
                **state,
                **sizes,
                **slots,
                **tiles,
            )
        enter_kernel[(batch * heads, triton.cdiv(tokens, block))](
            pages,
            rows.page_table,
            rows.window_key,
            rows.window_value,
            rows.window_score,
            invalid=rows.invalid.view(torch.uint8),
            key=key,
            value=value,
            rank=rank,
            key_matrix=key_rotation,
            value_matrix=value_rotation,
            offset=rows.key_offset if rows.key_offset.shape[2] else None,
            feedback=feedback,
            limit=limit,
            width=width,
            **strides("key", key),
            **strides("value", value),
            KEY_ROOT=root(tier.key_dim),
            VALUE_ROOT=root(tier.value_dim),
            INNER=INNER,
            OPERAND=tiles["DTYPE"] if pages.is_cuda else tl.float32,
            BLOCK=block,
            **state,
            **sizes,
            **slots,
            **tiles,
        )
        advance_kernel[(1,)](batch=batch, **lists, **state, **sizes, **counting)


def fix_offsets(
    rows: EnteredRows, key: Tensor, matrix: Tensor | None, rank: Tensor | None, shift: Tensor, state: dict[str, object]
) -> None:
    """Fixes the offsets of rows whose first token leaves the window; `shift` becomes what they grow by."""
    batch, heads, tokens, dim = key.shape
    parts = triton.cdiv(tokens, SUM_TOKENS * SUM_STEPS)
    sums = torch.empty(batch * heads, parts, dim, dtype=torch.float32, device=key.device)
    lanes = {"DIM": dim, "LANES": triton.next_power_of_2(dim), "num_warps": NUM_WARPS}
    sum_keys_kernel[(batch * heads, parts)](
        key, rank, sums, heads, tokens, parts, *key.stride()[:3], BLOCK=SUM_TOKENS, STEPS=SUM_STEPS, **lanes
    )
    fix_offsets_kernel[(batch * heads,)](
        sums, matrix, rows.window_key, rows.key_offset, shift, parts=parts, INNER=INNER, **state, **lanes
    )


def few_tokens(widest: int) -> int:
    """Tokens of a tile of `widest` channels that takes more registers, as it is rounded for queries or of two tiers."""
    return max(16, block_tokens(widest) // 2)


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{part}": tensor.stride(index) for index, part in enumerate(("batch", "head", "token"))}


def variants() -> list[KernelVariant]:
    """What the ahead-of-time report compiles: bf16 models whose keys are rotated and centred."""
    numbers = ("rows", "batch", "heads", "width", "tokens", "window", "slots", "sink_slots", "parts")
    strides = [f"{name}_{part}" for name in ("key", "value") for part in ("batch", "head", "token")]
    strides += ["inner_stride", "column_stride", "batch_stride", "head_stride", "token_stride"]
    types = {
        **dict.fromkeys(("pages", "invalid"), "*u8"),
        **dict.fromkeys(("window_key", "window_value", "key", "value", "tensor", "output"), "*bf16"),
        **dict.fromkeys(("window_score", "key_matrix", "value_matrix", "matrix", "offset", "shift", "sums"), "*fp32"),
        "feedback": "*fp32",
        **dict.fromkeys(("length", "window_start", "sink_end", "state"), "*i64"),
        **dict.fromkeys(("ring", "table", "high_count"), "*i32"),
        **dict.fromkeys((*numbers, *strides), "i32"),
        "limit": "fp32",
    }
    absent = {"rank": None, "count": None}
    found = []
    for precision, dim in itertools.product(UNIFORM_PRECISIONS, UNIFORM_DIMS):
        layout = PageLayout.build(precision, precision, dim, dim, 2, **UNIFORM_NUMBERS)
        tier = layout.high
        block = block_tokens(dim) if tier.k_bits > LARGEST_BITS else few_tokens(dim)
        widths = (padded_width(dim, tier.k_bits), padded_width(dim, tier.v_bits))
        tile = {"TIER": tier, "KEY_WIDTH": widths[0], "VALUE_WIDTH": widths[1], "DTYPE": tl.bfloat16, "BLOCK": block}
        product = {"KEY_ROOT": root(dim), "VALUE_ROOT": root(dim), "INNER": INNER, "OPERAND": tl.bfloat16}
        kernels = {enter_kernel: tile | product, leave_window_kernel: tile}
        if precision == UNIFORM_PRECISIONS[0]:
            lanes = {"DIM": dim, "LANES": triton.next_power_of_2(dim)}
            kernels |= {
                sum_keys_kernel: lanes | {"BLOCK": SUM_TOKENS, "STEPS": SUM_STEPS},
                fix_offsets_kernel: lanes | {"INNER": INNER},
                rotate_kernel: product
                | {"ROOT": root(dim), "DIM": dim, "WIDTH": lanes["LANES"], "DTYPE": tl.bfloat16, "BLOCK": block},
            }
            if dim == UNIFORM_DIMS[0]:
                counting = {"PAGE_TOKENS": tier.capacity, "CHUNK": ROWS_CHUNK}
                kernels |= {take_pages_kernel: counting, advance_kernel: counting}
        for kernel, constants in kernels.items():
            without = {"feedback": None} if tier.k_bits > LARGEST_BITS else {}
            constants = {**absent, **constants, **without}
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            signature = {name: types[name] for name in kernel.arg_names if name not in constants}
            found.append(
                KernelVariant(
                    name=f"{kernel.__name__.removesuffix('_kernel')}-{precision.name}_unscored-d{dim}",
                    kernel=kernel,
                    signature=signature,
                    constexprs=constants,
                    num_warps=ROUNDING_WARPS if "feedback" in signature else NUM_WARPS,
                )
            )
    return found
