"""One cache of one method, held over the forwards of a document: the calls that users of the cache make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import attention_of, passing
from .decoding import decode_by_forwards
from .methods.base import HeldBytes, Method, attends_fully


class Session:
    """A model with one cache of `method`, batch size 1.

    Args:
        tokenizer: needed by `generate` alone.
        cache, ids: a cache that has seen the tokens `ids` already.
    """

    def __init__(
        self, model: Any, method: Method, tokenizer: Any = None, cache: Any = None, ids: Sequence[int] = ()
    ) -> None:
        self.model, self.method, self.tokenizer = model, method, tokenizer
        self.cache = method.new_cache(model) if cache is None else cache
        # all that the cache has seen, which may be more than it holds
        self.ids = list(ids)

    @property
    def seen(self) -> int:
        """How many tokens the cache has seen."""
        return len(self.ids)

    def forward(self, ids: Sequence[int], keep: int = 1) -> Tensor:
        """Runs the model on further tokens.

        Args:
            ids: token ids that follow what the cache has seen.
            keep: how many of the last positions to return logits of.

        Returns:
            [keep, vocabulary] in the model's dtype.
        """
        positions = torch.arange(self.seen, self.seen + len(ids))
        return self._run(ids, positions, None, keep)

    def ask(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Runs the model on several continuations of what the cache has seen, none of which sees another.

        The cache is of no use afterwards: take a `branch`. Where all layers attend to all tokens, by an attention that
        takes a mask of truth values, they go in at once, kept apart by the mask: one forward instead of many, and the
        same logits.

        Returns:
            For each of them [tokens, vocabulary].
        """
        at_once = self.method.asks_at_once and attends_fully(self.model)
        if not at_once or attention_of(self.model.config) != "sdpa" or len(texts) == 1:
            return [self.branch().forward(ids, keep=len(ids)) for ids in texts]
        sizes = [len(ids) for ids in texts]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        # a last token that sees all others: what it does not see would count as padding
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
    def generate(self, ids: Sequence[int], max_new_tokens: int, **options: Any) -> str:
        """What the model writes behind `ids`, which follow what the cache has seen; special tokens left out.

        Args:
            options: of `generate()`, for example to sample; greedy without.
        """
        if self.method.drops_tokens:
            return decode_by_forwards(self, ids, max_new_tokens, options)
        whole = [*self.ids, *ids]
        prompt = torch.tensor([whole], device=self.model.device)
        with self.method.attached(self.model, self.cache):
            written = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **passing(self.cache),
                max_new_tokens=max_new_tokens,
                **{"do_sample": False, **options},
            )[0].tolist()
        # the last token that is written is not run any more
        self.ids = written[: self.cache.get_seq_length()]
        return self.tokenizer.decode(written[len(whole) :], skip_special_tokens=True)

    @torch.no_grad()
    def _run(self, ids: Sequence[int], positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        device = self.model.device
        with self.method.attached(self.model, self.cache):
            output = self.model(
                input_ids=torch.tensor([list(ids)], device=device),
                attention_mask=None if mask is None else mask.to(device),
                # a cache that drops tokens must not change the positions of those to come
                position_ids=positions[None].to(device),
                **passing(self.cache),
                use_cache=True,
                logits_to_keep=keep,
            )
        self.ids += ids
        return output.logits[0, -keep:]

    def branch(self) -> Session:
        """A session that goes on from here and leaves this one as it is."""
        return Session(self.model, self.method, self.tokenizer, self.method.branch(self.cache), self.ids)

    def held(self) -> HeldBytes:
        return self.method.held(self.cache)
