"""The numbers of narrow pages (`pages/layout.py`) in plain PyTorch: metadata and scores of 16 bits.

A score is a sum that grows at every step, by less than half of its last place in the end, so rounding to the nearest
would stop it. Additions round up or down at random instead, with the probabilities that make the mean the exact sum:
13 random bits are added to the bits of the float32 sum before the last 13 are cut off. They are a hash of the token's
index within its row and tier, the row's length and the tier, and so do not depend on pages or on who shares the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
