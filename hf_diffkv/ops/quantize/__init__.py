"""Quantise keys and values into pages, and read them back."""

from .reference import compute_dtype, dequantize, load_tokens, move_tokens, quantize, store_tokens

__all__ = ["compute_dtype", "dequantize", "load_tokens", "move_tokens", "quantize", "store_tokens"]
