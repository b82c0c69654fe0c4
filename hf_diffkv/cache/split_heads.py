"""Tensors of a layer whose heads are in two groups: taken apart, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config.head_groups import HeadGroup
from ..ops.softmax import Softmax
from .stores import wrong_heads


class SplitHeads:
    """Where each group of KV heads of a layer stands.

    Args:
        groups: have all heads of the layer between them.
    """

    def __init__(self, groups: Sequence[HeadGroup]) -> None:
        self.layer = groups[0].layer
        self._heads = [torch.tensor(group.heads) for group in groups]
        self._order = torch.cat(self._heads).argsort()
        # by device: no index may be made within a captured step
        self._moved: dict[torch.device, list[Tensor]] = {}

    @property
    def count(self) -> int:
        """KV heads of the layer."""
        return self._order.numel()

    def check(self, heads: int) -> None:
        """Raises `ValueError` unless a layer with so many KV heads is meant."""
        if heads != self.count:
            raise wrong_heads(self.layer, self.count, heads)

    def apart(self, tensor: Tensor, dim: int = 1) -> list[Tensor]:
        """Of each group what is its own of KV heads, or of query heads, along `dim`."""
        whole, (*indices, _) = tensor.unflatten(dim, (self.count, -1)), self._on(tensor.device)
        return [whole.index_select(dim, index).flatten(dim, dim + 1) for index in indices]

    def softmaxes(self, softmax: Softmax) -> list[Softmax]:
        """That of each group's query heads."""
        if softmax.sinks is None:
            return [softmax] * len(self._heads)
        return [replace(softmax, sinks=sinks) for sinks in self.apart(softmax.sinks, 0)]

    def together(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """What `apart` took apart."""
        pairs = zip(parts, self._heads)
        whole = torch.cat([part.unflatten(dim, (heads.numel(), -1)) for part, heads in pairs], dim)
        return whole.index_select(dim, self._on(whole.device)[-1]).flatten(dim, dim + 1)

    def _on(self, device: torch.device) -> list[Tensor]:
        if device not in self._moved:
            self._moved[device] = [index.to(device) for index in (*self._heads, self._order)]
        return self._moved[device]
