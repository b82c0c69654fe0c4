"""Several documents in one cache, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import passing
from .methods.base import HeldBytes, Method


class Batch:
    """A model with one cache of `method` for several documents; the method must have `batches`."""

    def __init__(self, model: Any, method: Method, tokenizer: Any) -> None:
        self.model, self.method, self.tokenizer = model, method, tokenizer
        self.cache = method.new_cache(model)
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad = next(token for token in known if token is not None)
        # what the cache has seen, [documents, tokens], and which of it is no padding
        self.ids: Tensor | None = None
        self.mask: Tensor | None = None
        # how many tokens a cache of its own would have seen of each document
        self.seen: list[int] = []

    @torch.no_grad()
    def forward(self, prompts: Sequence[Sequence[int]]) -> None:
        """Runs the model on further tokens of each document."""
        before = self._add(prompts)
        # as generate() counts: padding takes no position
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        with self.method.attached(self.model, self.cache):
            self.model(
                input_ids=self.ids[:, before:],
                attention_mask=self.mask,
                position_ids=positions[:, before:],
                **passing(self.cache),
                use_cache=True,
                logits_to_keep=1,
            )

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> list[str]:
        """What the model writes behind each of `prompts`, as `Session.generate` says; nothing may follow it."""
        self._add(prompts)
        length = self.ids.shape[1]
        with self.method.attached(self.model, self.cache):
            written = self.model.generate(
                self.ids,
                attention_mask=self.mask,
                **passing(self.cache),
                max_new_tokens=max_new_tokens,
                pad_token_id=self.pad,
                **{"do_sample": False, **options},
            )[:, length:]
        counts = self._written(written)
        # the last token that is written is not run any more
        self.seen = (self.mask.sum(-1) + counts - 1).tolist()
        self.mask = torch.cat([self.mask, torch.ones_like(written)], dim=1)
        return [
            self.tokenizer.decode(row[:count], skip_special_tokens=True) for row, count in zip(written, counts.tolist())
        ]

    def held(self) -> list[HeldBytes]:
        """What the documents take after `generate`, in bytes: the whole cache, shared out by tokens.

        A document's share is by the tokens it would have alone: neither padding nor what it gets behind its end, while
        others are still being written, is among them. Bytes of padding, where a cache holds it, are nobody's.
        """
        whole, length = self.method.held(self.cache), self.cache.get_seq_length()
        stored = length * len(self.seen) if self.method.stores_padding else int(self.mask[:, :length].sum())
        return [whole.share(tokens / stored) for tokens in self.seen]

    def _add(self, prompts: Sequence[Sequence[int]]) -> int:
        """Appends `prompts`, padded on the left; how many tokens there were before."""
        longest = max(len(ids) for ids in prompts)
        rows = [[self.pad] * (longest - len(ids)) + list(ids) for ids in prompts]
        ids = torch.tensor(rows, device=self.model.device)
        sizes = torch.tensor([len(ids) for ids in prompts], device=ids.device)
        mask = (torch.arange(longest, device=ids.device) >= longest - sizes[:, None]).long()
        if self.ids is None:
            self.ids, self.mask = ids, mask
            return 0
        before = self.ids.shape[1]
        self.ids, self.mask = torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1)
        return before

    def _written(self, written: Tensor) -> Tensor:
        """How many tokens each document got before its end, the token that ends it included, [documents]."""
        padding = (written == self.pad).flip(1).cumprod(1).sum(1)
        ends = self.model.generation_config.eos_token_id
        if self.pad in (ends if isinstance(ends, list) else [ends]):
            padding = (padding - 1).clamp(min=0)
        return written.shape[1] - padding
