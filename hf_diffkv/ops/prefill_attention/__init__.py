"""Attention of a prompt, or of several new tokens over a past, with the attention each key receives."""

from .reference import prefill_attention

__all__ = ["prefill_attention"]
