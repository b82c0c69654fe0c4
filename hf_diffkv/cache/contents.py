"""What of a cache is reported, saved and restored."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ..config import DiffKVConfig
from .held_tokens import HeldTokens
from .stores import Stores


class CacheContents(Protocol):
    """A cache as the code beneath it knows it.

    Attributes:
        layers: Transformers' own and compressed ones, one for each layer of the model.
        model_fingerprint: of the model's configuration (`snapshot.model_fingerprint`).
    """

    layers: list[Any]
    stores: Stores
    held_tokens: HeldTokens
    config: DiffKVConfig
    model_fingerprint: str

    def compressed_layers(self) -> list[int]:
        """Indices of the compressed layers."""

    def placed(self) -> list[Any]:
        """What takes the tokens of each group of heads (`Stores.groups`), in order; some layers have two."""

    def levels(self, layer_idx: int) -> Tensor:
        """int8 [batch, kv_heads, seen], as `DiffKVCache.levels`."""

    def get_seq_length(self) -> int:
        """Tokens seen."""

    def attach(self, model: Any) -> None:
        """Tells the cache over which devices and processes `model` is spread."""

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where pages, counts and tables disagree."""
