"""Attention of one new token per request over pages and window, updating significance sums."""

from .reference import decode_attention

__all__ = ["decode_attention"]
