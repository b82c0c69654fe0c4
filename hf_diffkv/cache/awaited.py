"""New tokens whose keys and values later layers of the model have yet to read, and the check of each reader."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..store import PromptAttention, RecordedAttention, StepAttention
from .errors import HandOverError


@dataclass
class AwaitedTokens:
    """New tokens that later layers have yet to read.

    Attributes:
        shape: shape of the keys, [batch, heads, tokens, key_dim].
        tokens: the tokens in their store.
        left: number of readers still to come.
        mask: attention mask that the storing layer was given.
        thread: identifier of the thread in which the storing layer attended.
    """

    shape: torch.Size
    tokens: PromptAttention | StepAttention | RecordedAttention
    left: int
    mask: Tensor | None = None
    thread: int = field(default_factory=threading.get_ident)

    def check(self, query: Tensor, key: Tensor, mask: Tensor | None) -> None:
        """Raises `HandOverError` unless a reader's mask, shapes and device match the storing layer's.

        Args:
            query: [batch, query_heads, n, key_dim] of the newest n tokens.
            key: [batch, heads, tokens, key_dim].
            mask: the reader's mask, which may be cut to the newest n tokens.
        """
        count, earlier = query.shape[2], self.shape[2] - query.shape[2]
        fits = earlier >= 0 and self.shape == key.shape and query.device == key.device
        if not (fits and self._is_same(mask, count)):
            raise HandOverError(
                "a layer that reads the keys and values of an earlier layer has a different attention mask or runs on "
                "a different device; this model cannot use DiffKVCache."
            )
        if count > 1 and earlier and mask is not None and mask.ndim == 4:
            part = mask[..., -self.shape[2] :][..., :earlier]
            if not bool((part == part[:, :, -1:]).all()):
                raise HandOverError(
                    "this attention mask hides some new tokens from only some of the last ones, the only queries of "
                    "layers that read an earlier layer's keys and values; pass logits_to_keep=0."
                )

    def _is_same(self, mask: Tensor | None, count: int) -> bool:
        if mask is None or self.mask is None:
            return mask is self.mask
        whole = self.mask if mask.ndim == 2 or mask.shape[-2] != count else self.mask[..., -count:, :]
        if mask.shape != whole.shape or mask.device != whole.device:
            return False
        # comparing values reads the device; steps of one token do not get here
        return (mask.data_ptr(), mask.stride()) == (whole.data_ptr(), whole.stride()) or bool((mask == whole).all())
