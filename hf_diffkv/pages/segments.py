"""Typed views of a page's six segments, and 16-bit metadata and scores (`pages/layout.py`).

A score is a sum that grows at every step. Its increments eventually fall below half a unit in the last place, where
rounding to nearest would stop the growth. Scores are therefore rounded stochastically, so that the expected value is
the exact sum: 13 random bits are added to the bits of the float32 sum before the last 13 are cut off. The random bits
are a hash of the token's index within its row and tier, the row's length and the tier, so they do not depend on pages
or on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import TierLayout

# float32 mantissa bits that a score lacks, and the float32 bits of its smallest exponent
SCORE_SHIFT = 13
SCORE_BASE = 81 << 23
LARGEST_SCORE = 0xFFFF
# float16 mantissa bits that a scale lacks, and the largest scale code
SCALE_SHIFT = 5
LARGEST_SCALE = 0x3DF
ZERO_LEVELS = 63
# step of the zero point as a share of the range: close to 1 / 63, with few bits so that zero points are exact
ZERO_STEP = 65 / 4096
# odd multipliers of the hash
INDEX_FACTOR, LENGTH_FACTOR, MIX_FACTOR = 0x9E3779B1, 0xB504F333, 0x93CD3A2D
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Segments:
    """Segments of all pages, read as pages of one tier with N tokens each.

    Attributes:
        key, value: packed codes, uint8 [pages, N, row bytes].
        key_metadata, value_metadata: (scale, zero) as float16 [pages, N, groups, 2], or uint16 bits in int16
            [pages, N, groups]; None at 16 bits.
        score: significance sums, float32 [pages, N], or uint16 bits in int16; None if pages have no scores.
        position: positions, int32 [pages, N], or uint16 bits in int16; None if pages have no positions.
    """

    key: Tensor
    value: Tensor
    key_metadata: Tensor | None
    value_metadata: Tensor | None
    score: Tensor | None
    position: Tensor | None

    def scores(self, page: Tensor, slot: Tensor) -> Tensor:
        """Reads the scores of tokens, float32 in the shape of `page` and `slot` (int64); zeros if pages have none."""
        if self.score is None:
            return torch.zeros(page.shape, dtype=torch.float32, device=page.device)
        return as_scores(self.score[page, slot])

    def positions(self, page: Tensor, slot: Tensor) -> Tensor:
        """Reads the positions of tokens, int32 in the shape of `page` and `slot` (int64)."""
        return as_positions(self.position[page, slot])

    def write_scores(self, page: Tensor, slot: Tensor, score: Tensor, noise: Tensor | None = None) -> None:
        """Stores float32 scores; 16-bit ones are rounded by `noise` (`score_noise`), or to nearest without it."""
        if self.score is None:
            return
        self.score[page, slot] = score if self.score.dtype == torch.float32 else stored_score(score, noise)

    def write_positions(self, page: Tensor, slot: Tensor, position: Tensor) -> None:
        if self.position is None:
            return
        # the lower half of an int32 holds the uint16 bits
        self.position[page, slot] = position.to(torch.int32).to(self.position.dtype)


class Contents(NamedTuple):
    """Contents of pages for n tokens.

    Attributes:
        key, value: keys, [n, key_dim], and values, [n, value_dim].
        score: significance sums, float32 [n].
        position: positions, int [n].
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor


def as_scores(stored: Tensor) -> Tensor:
    """Converts elements of `Segments.score` to float32."""
    return stored if stored.dtype == torch.float32 else score_of(stored)


def as_positions(stored: Tensor) -> Tensor:
    """Converts elements of `Segments.position` to int32."""
    return stored if stored.dtype == torch.int32 else stored.to(torch.int32) & 0xFFFF


def segments(pages: Tensor, tier: TierLayout) -> Segments:
    """Returns views into `pages`, uint8 [count, page_bytes] with contiguous rows; writes go to the pages."""
    return Segments(
        key=segment(pages, tier, tier.key_offset, tier.key_row, torch.uint8).unflatten(1, (-1, tier.key_row)),
        value=segment(pages, tier, tier.value_offset, tier.value_row, torch.uint8).unflatten(1, (-1, tier.value_row)),
        key_metadata=_metadata(pages, tier, tier.key_metadata_offset, tier.key_metadata, tier.k_groups),
        value_metadata=_metadata(pages, tier, tier.value_metadata_offset, tier.value_metadata, tier.v_groups),
        score=score_segment(pages, tier),
        position=_numbers(pages, tier, tier.position_offset, tier.position_bytes, torch.int32),
    )


def segment(pages: Tensor, tier: TierLayout, offset: int, token_bytes: int, dtype: torch.dtype) -> Tensor:
    """Returns one segment of all pages, a view [pages, elements]."""
    return pages[:, offset : offset + tier.capacity * token_bytes].view(dtype)


def score_segment(pages: Tensor, tier: TierLayout) -> Tensor | None:
    """Returns only `Segments.score`."""
    return _numbers(pages, tier, tier.score_offset, tier.score_bytes, torch.float32)


def _numbers(pages: Tensor, tier: TierLayout, offset: int, size: int, wide: torch.dtype) -> Tensor | None:
    """Returns a segment with one number of `size` bytes per token: `wide` for 4 bytes, int16 for 2, None for 0."""
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
    """Returns 16-bit metadata of groups, as uint16 bits in int16.

    The range is extended to contain 0. Its scale is rounded to 5 bits of mantissa. The zero point is the nearest one
    that aligns the middle of the range covered by the codes with the middle of the elements' range.

    Args:
        low, high: smallest and largest element of each group, float32.
        bits: bits of the codes.
    """
    levels = 2**bits - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    # the divisor is a tensor, because PyTorch may divide by a number differently
    half = ((high - low) / torch.full_like(low, levels)).half().view(torch.int16).to(torch.int32)
    scale = ((half + 0xF + (half >> SCALE_SHIFT & 1)) >> SCALE_SHIFT).clamp(max=LARGEST_SCALE)
    covered = _scale(scale) * levels
    zero = (covered - (low + high)) * (ZERO_LEVELS / 2) / torch.where(covered == 0, 1.0, covered)
    zero = torch.where(covered == 0, 0.0, zero.round()).clamp(0, ZERO_LEVELS).to(torch.int32)
    return (scale << 6 | zero).to(torch.int16)


def scale_and_zero(metadata: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the float32 scale and zero point of `bits`-bit codes from uint16 metadata bits in int16."""
    word = metadata.to(torch.int32)
    scale = _scale(word >> 6 & 0x3FF)
    return scale, -(word & ZERO_LEVELS).float() * scale * (ZERO_STEP * (2**bits - 1))


def _scale(code: Tensor) -> Tensor:
    return (code << SCALE_SHIFT).to(torch.int16).view(torch.float16).float()


def score_of(stored: Tensor) -> Tensor:
    """Returns float32 scores from uint16 bits in int16."""
    code = stored.to(torch.int32) & 0xFFFF
    return torch.where(code == 0, 0, (code << SCORE_SHIFT) + SCORE_BASE).view(torch.float32)


def stored_score(score: Tensor, noise: Tensor | None = None) -> Tensor:
    """Converts scores to uint16 bits in int16; scores above the largest one are clamped to it.

    Args:
        score: scores, float32, not negative.
        noise: random bits from `score_noise`, int32; None rounds to nearest, ties to even.
    """
    bits = score.view(torch.int32)
    if noise is None:
        noise = (1 << SCORE_SHIFT - 1) - 1 + (bits >> SCORE_SHIFT & 1)
    code = (bits + noise - SCORE_BASE) >> SCORE_SHIFT
    return code.clamp(0, LARGEST_SCORE).to(torch.int16)


def score_noise(index: Tensor, length: Tensor, tier: int) -> Tensor:
    """Returns the random bits that round scores, int32 in [0, 2^13).

    Args:
        index: index of each token within its row and tier, int.
        length: length of each token's row, int, broadcastable to `index`.
        tier: HIGH or LOW.
    """
    mixed = index.long() * INDEX_FACTOR + ((2 * length.long() + tier) & _WORD) * LENGTH_FACTOR & _WORD
    mixed = (mixed ^ mixed >> 15) * MIX_FACTOR & _WORD
    return (mixed >> 32 - SCORE_SHIFT).to(torch.int32)
