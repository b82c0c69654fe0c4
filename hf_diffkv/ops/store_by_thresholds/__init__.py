"""Many new tokens enter rows whose tokens are chosen by thresholds: all that a row holds is levelled anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...pages import FreeList, PageLayout
from ..backend import use_kernels, without_autocast
from . import reference
from .rows import LevelledRows

__all__ = ["LevelledRows", "relevel_tokens"]


def relevel_tokens(
    rows: LevelledRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    key: Tensor,
    value: Tensor,
    **options: Any,
) -> None:
    """Arguments as in `reference.relevel_tokens`. The kernels read nothing from the device."""
    _relevel(key, value, rows, pages, layout, free_list, options)


@without_autocast
def _relevel(
    key: Tensor,
    value: Tensor,
    rows: LevelledRows,
    pages: Tensor,
    layout: PageLayout,
    free_list: FreeList,
    options: dict[str, Any],
) -> None:
    implementation = reference
    if use_kernels(key.device, key.dtype):
        from . import launch as implementation
    implementation.relevel_tokens(rows, pages, layout, free_list, key, value, **options)
