"""Parallel KV compaction: tokens change level, pages are taken and given back, over all rows at once."""

from .reference import compact_step
from .rewrite import NewTokens, StoredTokens, rewrite_rows, stored_tokens

__all__ = ["NewTokens", "StoredTokens", "compact_step", "rewrite_rows", "stored_tokens"]
