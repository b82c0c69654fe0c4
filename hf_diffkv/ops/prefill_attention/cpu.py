"""Chooses how several new tokens attend where no kernels run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...pages import EarlierTokens
from ...pages.rows import NO_PAST
from .. import backend
from ..backend import NATIVE, REFERENCE
from ..softmax import Softmax
from . import flash, native, reference


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, past: EarlierTokens = NO_PAST, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attends from new tokens over a past and themselves; arguments and results as in the reference."""
    chosen = fastest(query, key, value, softmax, options.get("mask"))
    return chosen.prefill_attention(query, key, value, softmax, past=past, **options)


def fastest(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None) -> ModuleType:
    """Returns the module that attends fastest; arguments as in the reference."""
    if backend.forced == REFERENCE:
        return reference
    by_native = backend.forced in (None, NATIVE) and native.can_attend(query, value)
    if by_native and (backend.forced == NATIVE or not _multiplies_in_tiles(query.dtype)):
        return native
    if flash.can_attend(query, key, value, mask, softmax.softcap):
        return flash
    return native if by_native else reference


def _multiplies_in_tiles(dtype: torch.dtype) -> bool:
    """Returns whether PyTorch uses AMX for `dtype`; two passes of its attention are then faster than native code."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return dtype == torch.bfloat16 and has_amx is not None and has_amx()
