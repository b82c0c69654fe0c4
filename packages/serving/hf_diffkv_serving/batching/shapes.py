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
    """Of one layer: KV heads, query heads, elements of a key and of a value, and where they are.

    Attributes:
        max_positions: tokens that a request of the model may have; None where that is not known.
        ranks: that have the other heads of the layer.
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
    """The sliding-window layers of a model: their indices, and the tokens that each query sees, itself included."""

    layers: tuple[int, ...]
    window: int

    def pages(self, longest: int) -> int:
        """Pages, each in every layer, of a request of `longest` tokens."""
        return -(-min(self.window, longest) // SLIDING_PAGE)

    def bytes(self, shape: AttentionShape, requests: int, longest: int) -> int:
        """What `requests` requests of up to `longest` tokens take, whatever their length."""
        token = shape.num_heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        return (requests * self.pages(longest) + SPARE_PAGES) * len(self.layers) * SLIDING_PAGE * token
