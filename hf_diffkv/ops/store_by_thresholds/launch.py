"""Launcher of the kernels that decide all levels of rows again: at most ten launches, without reading the device."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from ...pages import LayerRows
from ..backend import launch
from ..prompt_tokens import Placement, PromptTokens
from ..quantize.launch import check_dtype
from ..rotation_kernel import NUM_WARPS
from ..store_uniform.launch import ROUNDING_WARPS, few_tokens, fix_offsets, given_arguments
from .kernels import count_kernel, decide_kernel, finish_kernel, list_kernel
from .move_kernels import close_kernel, demote_kernel, level_new_kernel, level_window_kernel

# tokens that are levelled and ranked at a time, and rows, blocks or pages that are counted at a time
BLOCK, CHUNK = 256, 128


def store_by_thresholds(
    rows: LayerRows,
    new: PromptTokens,
    placement: Placement,
    received: Tensor,
) -> None:
    """Updates the sums of all tokens, new ones included, and decides the levels of all tokens outside the windows.

    A token is high if its mean is at least alpha_high / N, low if it is at least alpha_low / N, and pruned otherwise
    (DiffKV, section 4.2). N is the request's length including the new tokens. No stored token is promoted. Only kernels
    run; nothing is read from the device.

    Args:
        rows: rows whose pages have scores and positions; the free list must hold all pages that they may lack, before
            any page is freed.
        new: new tokens.
        placement: form in which the tokens are stored.
        received: attention received in this forward, float32 [batch, heads, P + tokens]: first by the tokens of the row
            (high, low, then window by position; P is the length of the longest row), then by the new tokens.

    Raises:
        ValueError: the tokens do not fit the rows, kernels do not support their dtype, or `received` has another shape.
    """
    check_dtype(rows.dtype)
    rows.check_tokens(new.key, new.value)
    tokens, columns, many = new.key.shape[2], received.shape[-1], rows.count
    if received.ndim != 3 or received.shape[:2] != (rows.batch, rows.heads) or columns < tokens:
        raise ValueError(
            f"received must be {[rows.batch, rows.heads]} and at least {tokens} columns, not {list(received.shape)}."
        )
    if tokens == 0 or many == 0:
        return
    feedback, device = placement.feedback, rows.device
    past, blocks = columns - tokens, triton.cdiv(columns, BLOCK)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    given = given_arguments(rows, new, placement)
    shift = fix_offsets(rows, given) if placement.centers else None
    given |= {
        "received": received.contiguous(),
        "level": scratch(many, columns, dtype=torch.int8),
        "order": scratch(many, columns),
        "before": scratch(many, blocks, 4),
        "plan": scratch(6, many),
        "target": scratch(many, past),
        "entries": scratch(many, 2, rows.width),
        "ring_state": scratch(3, dtype=torch.int64),
        "shift": shift,
        "columns": columns,
        "past": past,
        "blocks": blocks,
        "CHUNK": CHUNK,
    }
    block = few_tokens(max(rows.layout.high.key_dim, rows.layout.high.value_dim))
    quantizing = {"BLOCK": block, "num_warps": NUM_WARPS if feedback is None else ROUNDING_WARPS}
    run = partial(launch, device=device, given=given)
    run(decide_kernel, (many, blocks), BLOCK=BLOCK, num_warps=NUM_WARPS)
    run(count_kernel, (many,), num_warps=NUM_WARPS)
    run(list_kernel, (many, blocks + 1), BLOCK=BLOCK, num_warps=NUM_WARPS)
    if past:
        run(demote_kernel, (many, triton.cdiv(past, block)), **quantizing)
        run(close_kernel, (many, triton.cdiv(past, block)), BLOCK=block, num_warps=NUM_WARPS)
        run(level_window_kernel, (many, triton.cdiv(rows.slots, block)), **quantizing)
    run(level_new_kernel, (many, triton.cdiv(tokens, block)), **quantizing)
    run(finish_kernel, (many,), num_warps=NUM_WARPS)
