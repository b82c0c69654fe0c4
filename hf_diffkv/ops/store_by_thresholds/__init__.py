"""Many new tokens enter rows whose tokens are chosen by thresholds: all that a row holds is levelled anew."""

from __future__ import annotations

from torch import Tensor

from ...pages import LayerRows
from ..prompt_tokens import Placement, PromptTokens

__all__ = ["store_by_thresholds"]


def store_by_thresholds(
    rows: LayerRows,
    new: PromptTokens,
    placement: Placement,
    received: Tensor,
    pin: tuple[int, int],
    pinned_sum: float,
) -> None:
    """Adds to the sums of all tokens of every request, new ones included, and levels all that is outside the windows.

    A token is high where its mean is alpha_high / N or more, low from alpha_low / N on, and pruned below (DiffKV,
    section 4.2); N is the request's length with the new tokens. No stored token rises. By kernels alone, which read
    nothing from the device.

    Args:
        rows: of pages with scores and positions; the free list holds all pages that they may lack, before any is given
            back.
        received: float32 [batch, heads, P + tokens], attention received in this forward: by what a row held (high
            tokens, low ones, those of the window by position; P of the longest row), then by the new tokens.
        pin: positions [start, stop) of tokens that are high once they leave the window; pinned_sum: the sum they have.

    Raises:
        ValueError: tokens that are not of these rows, or of a dtype without kernels; `received` of another shape.
    """
    from . import launch

    launch.store_by_thresholds(rows, new, placement, received, pin, pinned_sum)
