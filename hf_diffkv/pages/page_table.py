"""The bidirectional page table: one row per (layer, request, head).

High pages grow from the left, low pages from the right, so one narrow row serves any mix. An unused entry is 0, the
null page, which holds no token. A row is wide enough for all its tokens at the high level plus one partial page of
each tier, so the two ends never meet.
"""

from __future__ import annotations

import torch
from torch import Tensor

NULL_PAGE = 0
# tiers of pages
HIGH, LOW = 0, 1
# levels of tokens: padding has none, pruned ones are gone, the window's are exact
PADDING_LEVEL, PRUNED_LEVEL, LOW_LEVEL, HIGH_LEVEL, WINDOW_LEVEL = -1, 0, 1, 2, 3


class PageTable:
    """int32 [layers, batch, heads, width] of page ids; see `entries`."""

    def __init__(self, num_layers: int, batch_size: int, num_heads: int, device: torch.device) -> None:
        self.table = torch.zeros(num_layers, batch_size, num_heads, 2, dtype=torch.int32, device=device)

    @property
    def width(self) -> int:
        return self.table.shape[-1]

    def copy(self) -> PageTable:
        """The same entries, to be changed independently."""
        twin = object.__new__(PageTable)
        twin.table = self.table.clone()
        return twin

    def ensure_width(self, tokens: int, capacity: int, high_pages: Tensor) -> None:
        """Makes rows wide enough for `tokens` tokens, at least `capacity` of which fit into a page.

        Args:
            high_pages: int [layers, batch, heads], how many entries on the left are in use.
        """
        needed = -(-tokens // capacity) + 2
        width = self.width
        if needed <= width:
            return
        needed = max(needed, width + width // 8)
        is_high = torch.arange(width, device=self.table.device) < high_pages[..., None]
        grown = self.table.new_zeros(*self.table.shape[:-1], needed)
        grown[..., :width] = torch.where(is_high, self.table, NULL_PAGE)
        grown[..., needed - width :] += torch.where(is_high, NULL_PAGE, self.table)
        self.table = grown


def column(tier: int, page: Tensor, width: int) -> Tensor:
    """Column of a row's `page`-th page of `tier` (HIGH or LOW)."""
    return page if tier == HIGH else width - 1 - page
