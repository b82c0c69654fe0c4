"""Rounding of keys for the queries that will read them, before they are quantised into pages."""

from __future__ import annotations

from .reference import LARGEST_BITS, ModelFeedback

__all__ = ["LARGEST_BITS", "ModelFeedback"]
