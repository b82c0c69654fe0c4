"""Many new tokens enter rows that keep every token, in order: quantised into pages, or kept in the window."""

from __future__ import annotations

from ...pages import LayerRows
from ..prompt_tokens import Placement, PromptTokens

__all__ = ["store_uniform"]


def store_uniform(rows: LayerRows, new: PromptTokens, placement: Placement, holds: bool) -> None:
    """Stores new tokens of every request behind its others; what has left the window then is quantised.

    By kernels alone, which read nothing from the device.

    Args:
        rows: of pages without scores and positions, low where `alpha_high` is above 0; the free list holds all pages
            that they will lack.
        holds: whether any window holds a token.

    Raises:
        ValueError: tokens that are not of these rows, or of a dtype without kernels.
    """
    from . import launch

    launch.store_uniform(rows, new, placement, holds)
