"""Sessions: one cache of a method for all forwards of a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import attention_of, passing
from .methods.base import HeldBytes, Method, attends_fully


class Session:
    """A model with one cache of a method, at batch size 1.

    Args:
        cache, ids: cache that has already seen the token ids `ids`; None creates an empty one.
    """

    def __init__(self, model: Any, method: Method, cache: Any = None, ids: Sequence[int] = ()) -> None:
        self.model, self.method = model, method
        self.cache = method.new_cache(model) if cache is None else cache
        # all tokens that the cache has seen, which may be more than it holds
        self.ids = list(ids)

    @property
    def seen(self) -> int:
        """Number of tokens that the cache has seen."""
        return len(self.ids)

    def forward(self, ids: Sequence[int], keep: int = 1) -> Tensor:
        """Runs the model on further tokens.

        Args:
            keep: number of final positions whose logits are returned.

        Returns:
            Logits, [keep, vocabulary] in the model's dtype.
        """
        positions = torch.arange(self.seen, self.seen + len(ids))
        return self._run(ids, positions, None, keep)

    def ask(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Runs the model on several independent continuations of the tokens seen.

        The cache cannot be used afterwards, so call it on a `branch`. If all layers attend to all tokens and attention
        accepts a bool mask, one forward runs all continuations, separated by the mask. The logits are the same.

        Returns:
            Logits of each continuation, [tokens, vocabulary].
        """
        at_once = self.method.asks_at_once and attends_fully(self.model)
        if not at_once or attention_of(self.model.config) != "sdpa" or len(texts) == 1:
            return [self.branch().forward(ids, keep=len(ids)) for ids in texts]
        sizes = [len(ids) for ids in texts]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        # adds a final token that sees all others, as tokens hidden from the last one would count as padding
        owner = torch.cat([owner, owner.new_tensor([len(sizes)])])
        among = (owner[:, None] == owner[None]) | (owner[:, None] == len(sizes))
        past = self.cache.get_seq_length()
        mask = torch.cat([torch.ones(len(owner), past, dtype=torch.bool), among.tril()], dim=1)[None, None]
        positions = torch.cat([torch.arange(self.seen, self.seen + size) for size in sizes])
        positions = torch.cat([positions, positions.max()[None]])
        ids = [token for text in texts for token in text]
        logits = self._run([*ids, ids[-1]], positions, mask, len(ids) + 1)
        return list(logits[:-1].split(sizes))

    @torch.no_grad()
    def _run(self, ids: Sequence[int], positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        device = self.model.device
        with self.method.attached(self.model, self.cache):
            output = self.model(
                input_ids=torch.tensor([list(ids)], device=device),
                attention_mask=None if mask is None else mask.to(device),
                # explicit, as a cache that drops tokens must not shift later positions
                position_ids=positions[None].to(device),
                **passing(self.cache),
                use_cache=True,
                logits_to_keep=keep,
            )
        self.ids += ids
        return output.logits[0, -keep:]

    def branch(self) -> Session:
        """Makes a session that continues from here without changing this one."""
        return Session(self.model, self.method, self.method.branch(self.cache), self.ids)

    def held(self) -> HeldBytes:
        return self.method.held(self.cache)
