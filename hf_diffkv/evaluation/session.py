"""One cache of one method, held over the forwards of a document or of several: the calls that users of caches make."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..compat import attention_of, passing
from .methods.base import HeldBytes, Method, attends_fully

# what generate() takes where neither the model nor the caller says
DEFAULT_TOP_K = 50


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
        options = {"max_new_tokens": max_new_tokens, **options}
        written = _generated(self, prompt, torch.ones_like(prompt), options)[0].tolist()
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


class Batch:
    """A model with one cache of `method` for several documents, padded on the left; the method must have `batches`."""

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
        options = {"max_new_tokens": max_new_tokens, "pad_token_id": self.pad, **options}
        written = _generated(self, self.ids, self.mask, options)[:, length:]
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
        if self.pad in _ends(self.model.generation_config):
            padding = (padding - 1).clamp(min=0)
        return written.shape[1] - padding


def _generated(holder: Session | Batch, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    with holder.method.attached(holder.model, holder.cache):
        return holder.model.generate(
            ids, attention_mask=mask, **passing(holder.cache), **{"do_sample": False, **options}
        )


def decode_by_forwards(session: Session, ids: Sequence[int], max_new_tokens: int, options: dict[str, Any]) -> str:
    """The text that `generate()` would write with a cache that counts the tokens it forgets: one forward per token.

    Args:
        ids: token ids that follow what the cache has seen.
        options: `do_sample` and fields of `GenerationConfig`; further ones are those of the model.
    """
    config = copy.copy(session.model.generation_config)
    for name, value in options.items():
        if not hasattr(config, name):
            raise ValueError(f"no field {name!r} in GenerationConfig.")
        setattr(config, name, value)
    sample = options.get("do_sample", False)
    process, ends = _processors(config, sample), _ends(config)
    logits = session.forward(ids)[-1]
    written: list[int] = []
    while len(written) < max_new_tokens:
        seen = torch.tensor([session.ids], device=logits.device)
        scores = process(seen, logits[None].float())
        token = int(torch.multinomial(scores.softmax(-1), 1) if sample else scores.argmax(-1))
        written.append(token)
        if token in ends:
            break
        if len(written) < max_new_tokens:
            logits = session.forward([token])[-1]
    return session.tokenizer.decode(written, skip_special_tokens=True)


def _processors(config: GenerationConfig, sample: bool) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if not sample:
        return found
    if config.temperature not in (None, 1.0):
        found.append(TemperatureLogitsWarper(config.temperature))
    top_k = DEFAULT_TOP_K if config.top_k is None else config.top_k
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if config.top_p not in (None, 1.0):
        found.append(TopPLogitsWarper(config.top_p))
    if config.min_p is not None:
        found.append(MinPLogitsWarper(config.min_p))
    return found


def _ends(config: GenerationConfig) -> set[int]:
    ends = config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
