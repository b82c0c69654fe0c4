"""Page format, pool, free list and page table. Knows nothing of attention, policy or Transformers."""

from .cuda_reserve import CudaReservation
from .free_list import FreeList
from .layout import PageLayout, TierLayout, fields
from .page_table import (
    HIGH,
    HIGH_LEVEL,
    LOW,
    LOW_LEVEL,
    NULL_PAGE,
    PADDING_LEVEL,
    PRUNED_LEVEL,
    WINDOW_LEVEL,
    PageTable,
    column,
)
from .pool import PagePool
from .rows import KeptRows, LayerRows

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
