"""Stores for tests, of layers of one shape."""

from __future__ import annotations

import torch

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.store import KVHeads, Store


def new_store(config: DiffKVConfig, layers: int, batch: int, *heads: object, **sizes: object) -> Store:
    """A store; `heads` are fields of `KVHeads`, of which dtype and device may be left out: float32 on a CPU."""
    rest = (torch.float32, torch.device("cpu"))[len(heads) - 3 :]
    return Store(config, layers, batch, KVHeads(*heads, *rest), **sizes)
