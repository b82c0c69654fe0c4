"""Typed views of a page's six segments, and metadata and scores of 16 bits (`pages/layout.py`).

A score is a sum that grows at every step, by less than half of its last place in the end, so rounding to the nearest
would stop it. Additions round up or down at random instead, with the probabilities that make the mean the exact sum:
13 random bits are added to the bits of the float32 sum before the last 13 are cut off. They are a hash of the token's
index within its row and tier, the row's length and the tier, and so do not depend on pages or on who shares the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import TierLayout

# of bits of float32: what a score has less of mantissa, and where its exponent begins
SCORE_SHIFT = 13
SCORE_BASE = 81 << 23
LARGEST_SCORE = 0xFFFF
# of the float16 bits of a scale
SCALE_SHIFT = 5
LARGEST_SCALE = 0x3DF
ZERO_LEVELS = 63
# the zero point's step is this share of the range: near 1 / 63, and of few bits, so that zero points are exact
ZERO_STEP = 65 / 4096
# odd factors of the hash
INDEX_FACTOR, LENGTH_FACTOR, MIX_FACTOR = 0x9E3779B1, 0xB504F333, 0x93CD3A2D
_WORD = 0xFFFFFFFF


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
        """Stores float32 scores; where they are narrow rounded by `noise` (`score_noise`), or to the nearest."""
        if self.score is None:
            return
        self.score[page, slot] = score if self.score.dtype == torch.float32 else stored_score(score, noise)

    def write_positions(self, page: Tensor, slot: Tensor, position: Tensor) -> None:
        if self.position is None:
            return
        # of int32, the lower half are the bits of uint16
        self.position[page, slot] = position.to(torch.int32).to(self.position.dtype)


class Contents(NamedTuple):
    """What pages hold of n tokens.

    Attributes:
        key, value: [n, key_dim], [n, value_dim].
        score: float32 [n] significance sums. position: int [n].
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor


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


def group_metadata(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Metadata of groups of b-bit codes with the elements [low, high], float32: the bits of uint16 in int16.

    The scale is that of the range with 0 in it, rounded to 5 bits of mantissa, and the zero point the nearest to where
    the middle of what the codes cover is the middle of the range.
    """
    levels = 2**bits - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    # a tensor as the divisor, as PyTorch may divide by a number in other ways
    half = ((high - low) / torch.full_like(low, levels)).half().view(torch.int16).to(torch.int32)
    scale = ((half + 0xF + (half >> SCALE_SHIFT & 1)) >> SCALE_SHIFT).clamp(max=LARGEST_SCALE)
    covered = _scale(scale) * levels
    zero = (covered - (low + high)) * (ZERO_LEVELS / 2) / torch.where(covered == 0, 1.0, covered)
    zero = torch.where(covered == 0, 0.0, zero.round()).clamp(0, ZERO_LEVELS).to(torch.int32)
    return (scale << 6 | zero).to(torch.int16)


def scale_and_zero(metadata: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float32 scale and zero point of b-bit codes from the bits of uint16 in int16."""
    word = metadata.to(torch.int32)
    scale = _scale(word >> 6 & 0x3FF)
    return scale, -(word & ZERO_LEVELS).float() * scale * (ZERO_STEP * (2**bits - 1))


def _scale(code: Tensor) -> Tensor:
    return (code << SCALE_SHIFT).to(torch.int16).view(torch.float16).float()


def score_of(stored: Tensor) -> Tensor:
    """float32 scores from the bits of uint16 in int16."""
    code = stored.to(torch.int32) & 0xFFFF
    return torch.where(code == 0, 0, (code << SCORE_SHIFT) + SCORE_BASE).view(torch.float32)


def stored_score(score: Tensor, noise: Tensor | None = None) -> Tensor:
    """The bits of uint16, in int16, of float32 scores, which are not negative; those above the largest become that.

    Args:
        noise: int32 from `score_noise`; None rounds to the nearest, halves to the even one.
    """
    bits = score.view(torch.int32)
    if noise is None:
        noise = (1 << SCORE_SHIFT - 1) - 1 + (bits >> SCORE_SHIFT & 1)
    code = (bits + noise - SCORE_BASE) >> SCORE_SHIFT
    return code.clamp(0, LARGEST_SCORE).to(torch.int16)


def score_noise(index: Tensor, length: Tensor, tier: int) -> Tensor:
    """int32 in [0, 2^13) for tokens by index within row and tier and by the row's length, int of shapes that fit."""
    mixed = index.long() * INDEX_FACTOR + ((2 * length.long() + tier) & _WORD) * LENGTH_FACTOR & _WORD
    mixed = (mixed ^ mixed >> 15) * MIX_FACTOR & _WORD
    return (mixed >> 32 - SCORE_SHIFT).to(torch.int32)
