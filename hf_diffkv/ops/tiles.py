"""How work over ragged rows is bounded, and cut into pieces of equal size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE_TOKENS = 512


@dataclass(frozen=True)
class Tiles:
    """Pieces of one tier's rows, each of `pages` consecutive pages.

    Attributes:
        row: int64 [tiles], the row a piece belongs to.
        first: int64 [tiles], its first page within the row.
        pages: pages per piece.
        full: how many pieces, all of them in front, surely hold nothing but stored tokens.
    """

    row: Tensor
    first: Tensor
    pages: int
    full: int


@dataclass(frozen=True)
class Bounds:
    """What the host knows of the rows' lengths without asking the device.

    Attributes:
        max_tokens: no row holds more tokens, window included.
        tiles: pieces covering all high and all low pages; None where another backend than the reference runs, which
            reads the counts itself.
    """

    max_tokens: int
    tiles: tuple[Tiles, Tiles] | None = None

    def tensors(self) -> list[Tensor]:
        """The device memory behind it."""
        return [] if self.tiles is None else [t for tile in self.tiles for t in (tile.row, tile.first)]


def build_tiles(counts: np.ndarray, lookahead: int, capacity: int, device: torch.device) -> Tiles:
    """Covers rows that hold at least `counts` (int [rows]) tokens, and at most `lookahead` more.

    Args:
        capacity: tokens per page.
    """
    page_counts = -(-(counts.astype(np.int64) + lookahead) // capacity)
    longest = int(page_counts.max(initial=0))
    pages = max(1, min(longest, TILE_TOKENS // capacity))
    tiles = -(-page_counts // pages)
    row = np.repeat(np.arange(page_counts.size), tiles)
    first = (np.arange(row.size) - np.repeat(tiles.cumsum() - tiles, tiles)) * pages
    full = (first + pages) * capacity <= counts[row]
    order = np.argsort(~full, kind="stable")
    row, first = row[order], first[order]
    return Tiles(torch.from_numpy(row).to(device), torch.from_numpy(first).to(device), pages, int(full.sum()))
