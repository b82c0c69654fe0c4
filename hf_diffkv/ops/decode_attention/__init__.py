"""Attention of one new token per request over pages and window, updating significance sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...pages import PageLayout
from ..backend import KERNELS, NATIVE, choose, use_kernels, without_autocast
from ..tiles import Bounds
from . import native, reference
from .held import Held

if TYPE_CHECKING:
    from .scratch import Scratch

__all__ = ["Held", "allocate_scratch", "decode_attention"]


@without_autocast
def decode_attention(
    query: Tensor,
    pages: Tensor,
    layout: PageLayout,
    page_table: Tensor,
    high_count: Tensor,
    low_count: Tensor,
    window_key: Tensor,
    window_value: Tensor,
    window_score: Tensor,
    window_start: Tensor,
    length: Tensor,
    *,
    scaling: float,
    bounds: Bounds,
    valid: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scratch: Scratch | None = None,
    held: Held | None = None,
    sink_end: Tensor | None = None,
    sink_slots: int = 0,
) -> Tensor:
    """Arguments and result as in `reference.decode_attention`, except for:

    Args:
        bounds: what the host knows of the rows' lengths.
        scratch: from `allocate_scratch`; None allocates anew.
    """
    state = (pages, layout, page_table, high_count, low_count, window_key, window_value, window_score)
    options = {"scaling": scaling, "valid": valid, "softcap": softcap, "sinks": sinks, "held": held}
    options |= {"sink_end": sink_end, "sink_slots": sink_slots}
    backend = choose(query.device, query.dtype, layout.high, layout.low)
    if backend == NATIVE:
        return native.decode_attention(query, *state, window_start, length, **options)
    if backend == KERNELS:
        from . import launch

        return launch.decode_attention(
            query, *state, window_start, length, max_tokens=bounds.max_tokens, scratch=scratch, **options
        )
    return reference.decode_attention(query, *state, window_start, length, tiles=bounds.tiles, **options)


def allocate_scratch(
    query: Tensor, kv_heads: int, layout: PageLayout, window_slots: int, max_tokens: int
) -> Scratch | None:
    """Buffers the kernels reuse from step to step; None where the reference runs. query: [batch, query_heads, dim]."""
    if not use_kernels(query.device, query.dtype):
        return None
    from .scratch import Scratch

    batch, query_heads = query.shape[:2]
    return Scratch.allocate(batch, kv_heads, query_heads, layout, window_slots, max_tokens, query.dtype, query.device)
