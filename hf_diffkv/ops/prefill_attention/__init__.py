"""Attention of a prompt, or of several new tokens over a past, and the attention that each key receives."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...pages import EarlierTokens
from ...pages.rows import NO_PAST
from ..backend import NATIVE, choose, is_forced, use_kernels, without_autocast
from ..softmax import Softmax
from . import flash, native, reference

__all__ = ["prefill_attention"]

# tiles of wider heads would not fit a GPU's registers
KERNEL_HEAD_DIM = 512


@without_autocast
def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, past: EarlierTokens = NO_PAST, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attends from new tokens over a past and themselves; arguments and results as in the reference."""
    widest = max(key.shape[-1], value.shape[-1])
    if use_kernels(query.device, query.dtype) and (widest <= KERNEL_HEAD_DIM or is_forced("kernels")):
        if widest > KERNEL_HEAD_DIM:
            raise ValueError(f"the kernels take head dimensions up to {KERNEL_HEAD_DIM}, not {widest}.")
        from . import launch

        return launch.prefill_attention(query, key, value, softmax, past=past, **options)
    chosen = reference if is_forced("reference") else _on_cpu(query, key, value, softmax, past, options.get("mask"))
    return chosen.prefill_attention(query, key, value, softmax, past=past, **options)


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, past: EarlierTokens, mask: Tensor | None
) -> ModuleType:
    tiers = () if past.rows is None else (past.rows.layout.high, past.rows.layout.low)
    by_native = choose(query.device, query.dtype, *tiers) == NATIVE and native.can_attend(query, value)
    if by_native and (is_forced(NATIVE) or not _multiplies_in_tiles(query.dtype)):
        return native
    if flash.can_attend(query, key, value, mask, softmax.softcap):
        return flash
    return native if by_native else reference


def _multiplies_in_tiles(dtype: torch.dtype) -> bool:
    """Returns whether PyTorch uses AMX for `dtype`; two passes of its attention are then faster than native code."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return dtype == torch.bfloat16 and has_amx is not None and has_amx()
