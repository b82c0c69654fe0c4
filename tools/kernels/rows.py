"""Rows made from given tensors, for running an op without a store: compile report, benchmarks, tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_diffkv.pages import FreeList, LayerRows, PageLayout


def given_rows(layout: PageLayout, window_key: Tensor, window_value: Tensor, **given: Any) -> LayerRows:
    """A `LayerRows` with windows [batch, heads, slots, dim]; everything not given is zero.

    Args:
        given: fields of `LayerRows`; instead of `pool`, `pages` may be given, uint8 [pages, page_bytes] with none free.
    """
    batch, heads, slots = window_key.shape[:3]
    device = window_key.device

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    pages = given.pop("pages", None)
    pages = zeros(1, layout.page_bytes, dtype=torch.uint8) if pages is None else pages
    nothing = {
        "pool": SimpleNamespace(pages=pages, free_list=FreeList(device)),
        "page_table": zeros(batch, heads, 2, dtype=torch.int32),
        **{name: zeros(batch, heads, dtype=torch.int32) for name in ("high_count", "low_count")},
        "window_score": zeros(batch, heads, slots),
        **{name: zeros(batch, dtype=torch.int64) for name in ("window_start", "length", "sink_end")},
        "sink_slots": 0,
        "key_offset": zeros(batch, heads, 0),
        **{name: zeros(batch, heads) for name in ("alpha_high", "alpha_low")},
        "invalid": zeros(dtype=torch.bool),
    }
    return LayerRows(layout, window_key=window_key, window_value=window_value, **(nothing | given))
