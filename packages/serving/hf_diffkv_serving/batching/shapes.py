"""Shapes of a model's attention layers in continuous batching."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .ranks import Ranks

# tokens of a page of sliding-window layers, and how many such pages the engine's allocator keeps to itself
SLIDING_PAGE = 16
SPARE_PAGES = 2


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one layer, elements of its keys and values, their dtype and device.

    Attributes:
        max_positions: maximum tokens per request of the model; None if unknown.
        ranks: ranks that share the heads of the layer.
    """

    num_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int | None = None
    ranks: Ranks = Ranks()


@dataclass(frozen=True)
class SlidingShape:
    """The sliding-window layers of a model: their indices, and the tokens that each query sees, including itself."""

    layers: tuple[int, ...]
    window: int

    def pages(self, longest: int) -> int:
        """Returns the pages of a request of `longest` tokens in each layer."""
        return -(-min(self.window, longest) // SLIDING_PAGE)

    def bytes(self, shape: AttentionShape, requests: int, longest: int) -> int:
        """Returns the bytes of `requests` requests of up to `longest` tokens, whatever their length."""
        token = shape.num_heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        return (requests * self.pages(longest) + SPARE_PAGES) * len(self.layers) * SLIDING_PAGE * token
