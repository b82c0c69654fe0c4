"""Shape of the keys and values that a store holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVHeads:
    """KV heads of a layer on one device: number, elements of a key and a value, model's dtype, `latent` (latent.py)."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    latent: bool = False
