"""Bounds on ragged rows, and their division into tiles of equal size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

TILE_TOKENS = 512


@dataclass(frozen=True)
class Tiles:
    """Tiles of one tier's rows, each of `pages` consecutive pages.

    Attributes:
        row: row of each tile, int64 [tiles].
        first: first page of each tile within its row, int64 [tiles].
        pages: number of pages per tile.
        full: number of leading tiles that are known to be filled with stored tokens.
    """

    row: Tensor
    first: Tensor
    pages: int
    full: int


@dataclass(eq=False)
class Bounds:
    """The host's upper bounds on the rows' lengths, known without reading the device.

    Attributes:
        max_tokens: upper bound on the tokens of any row, window included.
        tiers: arguments of `build_tiles` for the high and the low pages; empty if the reference never runs.
    """

    max_tokens: int
    tiers: Sequence[tuple[Any, ...]] = ()

    @cached_property
    def tiles(self) -> tuple[Tiles, ...]:
        """Tiles that cover all high and all low pages. Backends other than the reference read the counts themselves."""
        return tuple(build_tiles(*tier) for tier in self.tiers)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors on the device."""
        return [t for tile in vars(self).get("tiles", ()) for t in (tile.row, tile.first)]


def build_tiles(counts: np.ndarray, lookahead: int, capacity: int, device: torch.device) -> Tiles:
    """Covers the pages of rows with tiles.

    Args:
        counts: minimum number of tokens of each row, int [rows].
        lookahead: maximum number of additional tokens per row.
        capacity: tokens per page.
        device: device of the result.
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
