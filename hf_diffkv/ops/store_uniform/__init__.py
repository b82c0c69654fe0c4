"""Many new tokens enter rows that keep every token high, in order: quantised into pages, or kept in the window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...pages import FreeList, PageLayout
from ..backend import use_kernels, without_autocast
from . import reference
from .rows import EnteredRows

__all__ = ["EnteredRows", "enter_tokens"]


def enter_tokens(
    rows: EnteredRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> None:
    """Arguments as in `reference.enter_tokens`. The kernels read nothing from the device."""
    _enter(key, value, rows, pages, layout, free_list, options)


@without_autocast
def _enter(
    key: Tensor,
    value: Tensor,
    rows: EnteredRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    options: dict[str, Any],
) -> None:
    implementation = reference
    if use_kernels(key.device, key.dtype):
        from . import launch as implementation
    implementation.enter_tokens(rows, pages, layout, free_list, key, value, **options)
