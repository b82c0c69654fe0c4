"""Triton helpers for metadata, scores and positions of pages, bit for bit as in `segments.py`.

BYTES is the size of a score, a position or a group's metadata: 2 in narrow pages, 4 in wide ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pages import segments

SCORE_SHIFT = tl.constexpr(segments.SCORE_SHIFT)
NOISE_SHIFT = tl.constexpr(32 - segments.SCORE_SHIFT)
BELOW_HALF = tl.constexpr((1 << segments.SCORE_SHIFT - 1) - 1)
SCORE_BASE = tl.constexpr(segments.SCORE_BASE)
LARGEST_SCORE = tl.constexpr(segments.LARGEST_SCORE)
LARGEST_SCALE = tl.constexpr(segments.LARGEST_SCALE)
ZERO_LEVELS = tl.constexpr(segments.ZERO_LEVELS)
HALF_LEVELS = tl.constexpr(segments.ZERO_LEVELS / 2)
INDEX_FACTOR = tl.constexpr(segments.INDEX_FACTOR)
LENGTH_FACTOR = tl.constexpr(segments.LENGTH_FACTOR)
MIX_FACTOR = tl.constexpr(segments.MIX_FACTOR)


@triton.constexpr_function
def zero_factor(bits):
    """Returns the factor of a zero point's 6 bits apart from the scale; all products are exact."""
    return -segments.ZERO_STEP * (2**bits - 1)


@triton.jit
def load_metadata(pointer, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Loads (scale, zero) of groups of codes of BITS bits, float32.

    Args:
        pointer: uint8 pointers, aligned to BYTES, of any shape.
    """
    return metadata_of(load_words(pointer, None, BYTES), BYTES, BITS)


@triton.jit
def load_words(pointer, mask, BYTES: tl.constexpr):
    """Loads the words for `metadata_of`, uint16 or uint32; `mask` may be None."""
    if BYTES == 2:
        return tl.load(pointer.to(tl.pointer_type(tl.uint16)), mask=mask)
    else:
        return tl.load(pointer.to(tl.pointer_type(tl.uint32)), mask=mask)


@triton.jit
def metadata_of(word, BYTES: tl.constexpr, BITS: tl.constexpr):
    if BYTES == 2:
        return scale_and_zero(word, BITS)
    else:
        return pair_of(word)


@triton.jit
def pair_of(word):
    """Returns the scale and zero point from uint32: fp16 scale in the low half, fp16 zero point in the high half."""
    scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    zero = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def scale_and_zero(word, BITS: tl.constexpr):
    """Returns the scale and zero point from uint16."""
    word = word.to(tl.uint32)
    scale = scale_of(word >> 6)
    # as a float, these bits are 2^23 plus the 6 bits, which is cheaper than a conversion
    levels = ((word & ZERO_LEVELS) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return scale, levels * scale * zero_factor(BITS)


@triton.jit
def scale_of(code):
    """Returns the float32 scale with the given 10 bits, an integer."""
    return (code << 5).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def narrow_metadata(low, high, BITS: tl.constexpr):
    """Returns 16-bit metadata of groups with the smallest and largest elements `low` and `high`."""
    LEVELS: tl.constexpr = 2**BITS - 1
    low = tl.minimum(low, 0.0)
    high = tl.maximum(high, 0.0)
    half = tl.div_rn(high - low, tl.zeros_like(low) + LEVELS).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    scale = tl.minimum((half + 0xF + ((half >> 5) & 1)) >> 5, LARGEST_SCALE)
    covered = scale_of(scale) * LEVELS
    # the division comes last, so that no addition can be fused with a product
    zero = tl.div_rn((covered - (low + high)) * HALF_LEVELS, tl.where(covered == 0.0, 1.0, covered))
    zero = tl.minimum(tl.maximum((zero + 12582912.0) - 12582912.0, 0.0), ZERO_LEVELS)
    zero = tl.where(covered == 0.0, 0.0, zero).to(tl.int32)
    return (scale << 6 | zero).to(tl.uint16)


@triton.jit
def score_noise(index, length, TIER: tl.constexpr):
    """Returns 13 random bits, int32, from a token's index within row and tier (int32) and the row's length (scalar)."""
    mixed = index.to(tl.uint32) * INDEX_FACTOR + (2 * length.to(tl.uint32) + TIER) * LENGTH_FACTOR
    mixed = (mixed ^ (mixed >> 15)) * MIX_FACTOR
    return (mixed >> NOISE_SHIFT).to(tl.int32)


@triton.jit
def score_of(code):
    """Returns float32 scores from uint16 bits."""
    code = code.to(tl.int32)
    return tl.where(code == 0, 0, (code << SCORE_SHIFT) + SCORE_BASE).to(tl.float32, bitcast=True)


@triton.jit
def narrow_score(score, noise):
    """Rounds float32 scores to uint16 bits; `noise` is 13 bits, int32."""
    code = (score.to(tl.int32, bitcast=True) + noise - SCORE_BASE) >> SCORE_SHIFT
    return tl.minimum(tl.maximum(code, 0), LARGEST_SCORE).to(tl.uint16)


@triton.jit
def load_scores(segment, slot, mask, BYTES: tl.constexpr):
    """Loads the float32 scores of slots, 0 where `mask` is False; `segment` is uint8 pointers to the pages' scores."""
    if BYTES == 2:
        return score_of(tl.load(segment.to(tl.pointer_type(tl.uint16)) + slot, mask=mask, other=0))
    else:
        return tl.load(segment.to(tl.pointer_type(tl.float32)) + slot, mask=mask, other=0.0)


@triton.jit
def store_scores(segment, slot, score, mask, BYTES: tl.constexpr):
    """Stores the initial scores of slots; 2-byte scores are rounded to nearest."""
    if BYTES == 2:
        bits = score.to(tl.int32, bitcast=True)
        noise = BELOW_HALF + ((bits >> SCORE_SHIFT) & 1)
        tl.store(segment.to(tl.pointer_type(tl.uint16)) + slot, narrow_score(score, noise), mask=mask)
    else:
        tl.store(segment.to(tl.pointer_type(tl.float32)) + slot, score, mask=mask)


@triton.jit
def load_positions(segment, slot, mask, BYTES: tl.constexpr):
    """Loads the int32 positions of slots, 0 where `mask` is False."""
    if BYTES == 2:
        return tl.load(segment.to(tl.pointer_type(tl.uint16)) + slot, mask=mask, other=0).to(tl.int32)
    else:
        return tl.load(segment.to(tl.pointer_type(tl.int32)) + slot, mask=mask, other=0)


@triton.jit
def store_positions(segment, slot, position, mask, BYTES: tl.constexpr):
    if BYTES == 2:
        tl.store(segment.to(tl.pointer_type(tl.uint16)) + slot, position.to(tl.uint16), mask=mask)
    else:
        tl.store(segment.to(tl.pointer_type(tl.int32)) + slot, position.to(tl.int32), mask=mask)
