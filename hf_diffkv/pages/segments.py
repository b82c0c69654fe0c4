"""Typed views of a page's six segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import TierLayout
from .narrow import score_of, stored_score


@dataclass(frozen=True)
class Segments:
    """The segments of all pages, seen as pages of one tier. N tokens per page.

    Attributes:
        key, value: uint8 [pages, N, row bytes].
        key_metadata, value_metadata: float16 [pages, N, groups, 2] of (scale, zero), or the bits of uint16 in int16
            [pages, N, groups]; None at 16 bits.
        score: float32 [pages, N], or the bits of uint16 in int16; None where pages have no scores.
        position: int32 [pages, N], or the bits of uint16 in int16; None where they have no positions.
    """

    key: Tensor
    value: Tensor
    key_metadata: Tensor | None
    value_metadata: Tensor | None
    score: Tensor | None
    position: Tensor | None

    def scores(self, page: Tensor, slot: Tensor) -> Tensor:
        """float32, of the shape of page and slot, int64 each; zeros where pages have none."""
        if self.score is None:
            return torch.zeros(page.shape, device=page.device)
        return as_scores(self.score[page, slot])

    def positions(self, page: Tensor, slot: Tensor) -> Tensor:
        """int32, likewise."""
        return as_positions(self.position[page, slot])

    def write_scores(self, page: Tensor, slot: Tensor, score: Tensor, noise: Tensor | None = None) -> None:
        """Stores float32 scores; where they are narrow rounded by `noise` (`pages/narrow.py`), or to the nearest."""
        if self.score is None:
            return
        self.score[page, slot] = score if self.score.dtype == torch.float32 else stored_score(score, noise)

    def write_positions(self, page: Tensor, slot: Tensor, position: Tensor) -> None:
        if self.position is None:
            return
        # of int32, the lower half are the bits of uint16
        self.position[page, slot] = position.to(torch.int32).to(self.position.dtype)


def as_scores(stored: Tensor) -> Tensor:
    """Elements of `Segments.score` as float32."""
    return stored if stored.dtype == torch.float32 else score_of(stored)


def as_positions(stored: Tensor) -> Tensor:
    """Elements of `Segments.position` as int32."""
    return stored if stored.dtype == torch.int32 else stored.to(torch.int32) & 0xFFFF


def segments(pages: Tensor, tier: TierLayout) -> Segments:
    """Views into `pages` (uint8 [count, page_bytes], rows contiguous); writing to them writes to the pages."""
    return Segments(
        key=segment(pages, tier, tier.key_offset, tier.key_row, torch.uint8).unflatten(1, (-1, tier.key_row)),
        value=segment(pages, tier, tier.value_offset, tier.value_row, torch.uint8).unflatten(1, (-1, tier.value_row)),
        key_metadata=_metadata(pages, tier, tier.key_metadata_offset, tier.key_metadata, tier.k_groups),
        value_metadata=_metadata(pages, tier, tier.value_metadata_offset, tier.value_metadata, tier.v_groups),
        score=score_segment(pages, tier),
        position=_numbers(pages, tier, tier.position_offset, tier.position_bytes, torch.int32),
    )


def segment(pages: Tensor, tier: TierLayout, offset: int, token_bytes: int, dtype: torch.dtype) -> Tensor:
    """One segment of all pages, a view [pages, elements]."""
    return pages[:, offset : offset + tier.capacity * token_bytes].view(dtype)


def score_segment(pages: Tensor, tier: TierLayout) -> Tensor | None:
    """`Segments.score`."""
    return _numbers(pages, tier, tier.score_offset, tier.score_bytes, torch.float32)


def _numbers(pages: Tensor, tier: TierLayout, offset: int, size: int, wide: torch.dtype) -> Tensor | None:
    """One number of `size` bytes for each token, of dtype `wide` where it has 4; None where it has 0."""
    if size == 0:
        return None
    return segment(pages, tier, offset, size, wide if size == 4 else torch.int16)


def _metadata(pages: Tensor, tier: TierLayout, offset: int, size: int, groups: int) -> Tensor | None:
    if size == 0:
        return None
    shape = (tier.capacity, groups) if size == 2 else (tier.capacity, groups, 2)
    dtype = torch.int16 if size == 2 else torch.float16
    return segment(pages, tier, offset, size * groups, dtype).unflatten(1, shape)
