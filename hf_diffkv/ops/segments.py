"""Typed views of a page's six segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import TierLayout


@dataclass(frozen=True)
class Segments:
    """The segments of all pages, seen as pages of one tier. N tokens per page.

    Attributes:
        key, value: uint8 [pages, N, row bytes].
        key_metadata, value_metadata: float16 [pages, N, groups, 2] of (scale, zero); None at 16 bits.
        score: float32 [pages, N].
        position: int32 [pages, N].
    """

    key: Tensor
    value: Tensor
    key_metadata: Tensor | None
    value_metadata: Tensor | None
    score: Tensor
    position: Tensor


def segments(pages: Tensor, tier: TierLayout) -> Segments:
    """Views into `pages` (uint8 [count, page_bytes], rows contiguous); writing to them writes to the pages."""
    count = pages.shape[0]
    capacity = tier.capacity

    def part(offset: int, token_bytes: int, dtype: torch.dtype) -> Tensor:
        return pages[:, offset : offset + capacity * token_bytes].view(dtype)

    def metadata(offset: int, bits: int, groups: int) -> Tensor | None:
        if bits == 16:
            return None
        return part(offset, 4 * groups, torch.float16).unflatten(1, (capacity, groups, 2))

    return Segments(
        key=part(tier.key_offset, tier.key_row, torch.uint8).unflatten(1, (capacity, tier.key_row)),
        value=part(tier.value_offset, tier.value_row, torch.uint8).unflatten(1, (capacity, tier.value_row)),
        key_metadata=metadata(tier.key_metadata_offset, tier.k_bits, tier.k_groups),
        value_metadata=metadata(tier.value_metadata_offset, tier.v_bits, tier.v_groups),
        score=part(tier.score_offset, 4, torch.float32).view(count, capacity),
        position=part(tier.position_offset, 4, torch.int32).view(count, capacity),
    )
