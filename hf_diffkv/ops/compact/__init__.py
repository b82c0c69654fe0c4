"""Parallel KV compaction: changes tokens' levels, and takes and frees pages, for all rows at once."""

from __future__ import annotations

from .rewrite import DenseTokens, NewTokens, StoredTokens, rewrite_rows, stored_tokens, token_positions

__all__ = ["DenseTokens", "NewTokens", "StoredTokens", "rewrite_rows", "stored_tokens", "token_positions"]
