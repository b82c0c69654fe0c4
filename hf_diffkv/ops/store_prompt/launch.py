"""Launcher of the kernels that store a prompt without reading the device: at most nine launches, ten by thresholds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import device_of, launch, row_arguments, unit_stride
from ..quantize.launch import TRITON_DTYPES, check_dtype, dot_dtype
from ..rotation_kernel import INNER, NUM_WARPS, block_tokens, root, rotate
from ..rounding.reference import LARGEST_BITS
from .code_kernels import choose_codes_kernel
from .level_kernels import count_kernel, decide_kernel, list_kernel
from .move_kernels import close_kernel, demote_kernel, level_new_kernel, level_window_kernel
from .offset_kernels import fix_offsets_kernel, sum_keys_kernel
from .order_kernels import leave_window_kernel, store_new_kernel, take_pages_kernel
from .row_kernels import advance_kernel
from .tokens import Placement, PromptTokens

SUM_TOKENS, SUM_STEPS = 32, 16
# tokens levelled and ranked at a time, and rows, blocks or pages counted at a time
BLOCK, CHUNK = 256, 128
# warps for a tile of keys that is rounded where it is stored, which takes more registers and therefore has fewer tokens
ROUNDING_WARPS = 8
# tokens whose codes a warp chooses at a time
CODE_TOKENS = 8
MOST_GROUPS = 2


def store_prompt(
    rows: LayerRows, new: PromptTokens, placement: Placement, past: int, received: Tensor | None = None
) -> None:
    """Appends new tokens to every request, and quantises the tokens that leave the windows, all in kernels.

    With `received`, it updates the sums of all tokens, including new ones, and decides the levels of all tokens outside
    the windows. A token is high if its mean is at least alpha_high / N, low if it is at least alpha_low / N, and pruned
    otherwise (DiffKV, section 4.2). N is the request's length including the new tokens. No stored token is promoted.
    Without it, all tokens of a row enter the low tier if `alpha_high` is above 0, otherwise the high tier.
    Nothing is read from the device.

    Args:
        rows: rows whose pages have scores and positions if `received` is given, and none otherwise. The free list must
            hold all pages that the rows may need before any page is freed.
        new: new tokens.
        placement: form in which the tokens are stored.
        past: earlier length P of the longest row, window included; without `received`, only whether it is 0 matters.
        received: attention received in this forward, float32 [batch, heads, P + tokens]: first by the row's old tokens
            (high, low, then window by position), then by the new ones. None if the pages have no scores.

    Raises:
        ValueError: the tokens do not fit the rows, kernels do not support their dtype, or `received` does not fit.
    """
    check_dtype(rows.dtype)
    rows.check_tokens(new.key, new.value)
    tokens, many = new.key.shape[2], rows.count
    wanted = [rows.batch, rows.heads, past + tokens]
    if received is not None and list(received.shape) != wanted:
        raise ValueError(f"received must be {wanted}, not {list(received.shape)}.")
    if tokens == 0 or many == 0:
        return
    given = _arguments(rows, new, placement)
    given["shift"] = _fix_offsets(rows, given) if placement.centers else None
    run = partial(launch, device=rows.device, given=given, num_warps=NUM_WARPS)
    whole = block_tokens(max(rows.layout.high.key_dim, rows.layout.high.value_dim))
    # rounding, and two tiers at once, need more registers
    block = whole if received is None and placement.feedback is None else max(16, whole // 2)
    tiles = {"BLOCK": block, "num_warps": NUM_WARPS if placement.feedback is None else ROUNDING_WARPS}

    def grid(tokens: int, block: int = block) -> tuple[int, int, int]:
        return triton.cdiv(tokens, block), rows.heads, rows.batch

    if received is None:
        run(take_pages_kernel, (many,))
        if past:
            run(leave_window_kernel, grid(rows.slots), **tiles)
        given["codes"] = _choose_codes(rows, new, placement, given)
        if given["codes"] is not None:
            warps = NUM_WARPS if rows.layout.one_tier else ROUNDING_WARPS
            run(store_new_kernel, grid(tokens, whole), BLOCK=whole, num_warps=warps)
        else:
            run(store_new_kernel, grid(tokens), **tiles)
    else:
        given |= _lists(rows, received.contiguous(), past)
        run(decide_kernel, (many, given["blocks"]), BLOCK=BLOCK)
        run(count_kernel, (many,))
        run(list_kernel, (many, given["blocks"] + 1), BLOCK=BLOCK)
        if past:
            run(demote_kernel, grid(past), **tiles)
            run(close_kernel, grid(past), BLOCK=block)
            run(level_window_kernel, grid(rows.slots), **tiles)
        run(level_new_kernel, grid(tokens), **tiles)
    run(advance_kernel, (many,))


def _arguments(rows: LayerRows, new: PromptTokens, placement: Placement) -> dict[str, object]:
    """Returns the arguments of all kernels, by parameter name."""
    new = replace(new, key=unit_stride(new.key), value=unit_stride(new.value))
    (high, low), one_tier, scratch = rows.tiers, rows.layout.one_tier, _scratch(rows)
    return {
        **row_arguments(rows),
        "alpha_high": None if one_tier else rows.alpha_high,
        "alpha_low": rows.alpha_low,
        "low_count": None if one_tier else rows.low_count,
        "plan": scratch(6, rows.count),
        "ring_state": scratch(3, dtype=torch.int64),
        "entries": None,
        "invalid": rows.invalid.view(torch.uint8),
        "offset": rows.offset,
        "key": new.key,
        "value": new.value,
        "rank": new.rank,
        "count": new.count,
        "tokens": new.key.shape[2],
        "window": placement.window,
        "limit": placement.limit,
        "feedback": placement.feedback,
        "key_matrix": placement.rotation.key,
        "value_matrix": placement.rotation.value,
        **_strides("key", new.key),
        **_strides("value", new.value),
        "DTYPE": TRITON_DTYPES[rows.dtype],
        "KEY_ROOT": root(high.key_dim),
        "VALUE_ROOT": root(high.value_dim),
        "INNER": INNER,
        "OPERAND": dot_dtype(rows.dtype, device_of(rows.device).target),
        "HIGH_CAPACITY": high.capacity,
        "LOW_CAPACITY": low.capacity,
        "CHUNK": CHUNK,
    }


def _lists(rows: LayerRows, received: Tensor, past: int) -> dict[str, object]:
    """Returns the other arguments of kernels that choose by thresholds; see `level_kernels.py`."""
    columns, scratch = received.shape[-1], _scratch(rows)
    blocks = triton.cdiv(columns, BLOCK)
    return {
        "received": received,
        "level": scratch(rows.count, columns, dtype=torch.int8),
        "order": scratch(rows.count, columns),
        "before": scratch(rows.count, blocks, 4),
        "target": scratch(rows.count, past),
        "entries": scratch(rows.count, 2, rows.width),
        "columns": columns,
        "past": past,
        "blocks": blocks,
    }


def _scratch(rows: LayerRows) -> Callable[..., Tensor]:
    """Returns a function that allocates integers on the rows' device."""
    return partial(torch.empty, dtype=torch.int32, device=rows.device)


def _fix_offsets(rows: LayerRows, given: dict[str, object]) -> Tensor:
    """Fixes the offsets of rows whose first token leaves the window; returns the change, in the offsets' shape."""
    device, (*_, tokens, dim) = rows.device, given["key"].shape
    parts = triton.cdiv(tokens, SUM_TOKENS * SUM_STEPS)
    sums = torch.empty(rows.count, parts, dim, dtype=torch.float32, device=device)
    shift = torch.empty_like(rows.key_offset)
    run = partial(launch, device=device, DIM=dim, LANES=triton.next_power_of_2(dim), num_warps=NUM_WARPS)
    given = given | {"sums": sums, "parts": parts, "shift": shift, "matrix": given["key_matrix"]}
    run(sum_keys_kernel, (rows.count, parts), given=given, BLOCK=SUM_TOKENS, STEPS=SUM_STEPS)
    run(fix_offsets_kernel, (rows.count,), given=given)
    return shift


def _choose_codes(rows: LayerRows, new: PromptTokens, placement: Placement, given: dict[str, object]) -> Tensor | None:
    """Returns the codes of new keys, uint8 [rows, tokens, key_dim]; None if they are the nearest ones."""
    feedback, width = placement.feedback, triton.next_power_of_2(new.key.shape[3])
    # a kernel has code for each group
    if feedback is None or any(tier.k_groups > MOST_GROUPS for tier in rows.tiers if tier.k_bits <= LARGEST_BITS):
        return None
    key = rotate(new.key, placement.rotation.key, rows.offset).contiguous()
    codes = torch.empty(rows.count, *key.shape[2:], dtype=torch.uint8, device=key.device)
    given = given | {"key": key, "matrix": feedback.mT.contiguous(), "codes": codes}
    grid = triton.cdiv(key.shape[2], CODE_TOKENS), rows.heads, rows.batch
    launch(choose_codes_kernel, grid, key.device, given, WIDTH=width, BLOCK=CODE_TOKENS, num_warps=1)
    return codes


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"{name}_{part}": tensor.stride(index) for index, part in enumerate(("batch", "head", "token"))}
