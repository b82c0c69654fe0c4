"""How the work over ragged rows is cut into pieces of equal size."""

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
    """

    row: Tensor
    first: Tensor
    pages: int


def build_tiles(page_counts: np.ndarray, capacity: int, device: torch.device) -> Tiles:
    """Covers rows of `page_counts` (int [rows], upper bounds known to the host) pages of `capacity` tokens each."""
    longest = int(page_counts.max(initial=0))
    pages = max(1, min(longest, TILE_TOKENS // capacity))
    tiles = -(-page_counts.astype(np.int64) // pages)
    row = np.repeat(np.arange(page_counts.size), tiles)
    first = (np.arange(row.size) - np.repeat(tiles.cumsum() - tiles, tiles)) * pages
    return Tiles(torch.from_numpy(row).to(device), torch.from_numpy(first).to(device), pages)
