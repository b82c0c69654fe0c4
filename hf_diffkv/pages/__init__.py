"""Page format, page pool, free list and page table. Knows nothing of attention, policies or Transformers."""

from .cuda_reserve import CudaReservation
from .layout import PageLayout, TierLayout, fields
from .pool import NULL_PAGE, FreeList, PagePool
from .rows import (
    HIGH,
    HIGH_LEVEL,
    LOW,
    LOW_LEVEL,
    PADDING_LEVEL,
    PRUNED_LEVEL,
    WINDOW_LEVEL,
    EarlierTokens,
    KeptRows,
    LayerRows,
    PageTable,
    column,
)

__all__ = [
    "HIGH",
    "HIGH_LEVEL",
    "LOW",
    "LOW_LEVEL",
    "NULL_PAGE",
    "PADDING_LEVEL",
    "PRUNED_LEVEL",
    "WINDOW_LEVEL",
    "CudaReservation",
    "EarlierTokens",
    "FreeList",
    "KeptRows",
    "LayerRows",
    "PageLayout",
    "PagePool",
    "PageTable",
    "TierLayout",
    "column",
    "fields",
]
