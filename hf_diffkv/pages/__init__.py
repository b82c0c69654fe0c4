"""Page format, pool, free list and page table. Knows nothing of attention, policy or Transformers."""

from .free_list import FreeList
from .layout import PageLayout, TierLayout, fields
from .page_table import HIGH, LOW, NULL_PAGE, PageTable, column
from .pool import PagePool

__all__ = [
    "HIGH",
    "LOW",
    "NULL_PAGE",
    "FreeList",
    "PageLayout",
    "PagePool",
    "PageTable",
    "TierLayout",
    "column",
    "fields",
]
