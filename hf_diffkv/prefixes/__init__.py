"""Prefixes of requests, kept compressed and reused (docs/prefixes.md)."""

from .stats import PrefixEntry, PrefixStats
from .store import PrefixStore

__all__ = ["PrefixEntry", "PrefixStats", "PrefixStore"]
