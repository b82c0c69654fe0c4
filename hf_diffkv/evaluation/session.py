"""Sessions: one cache of a method over the forwards of one or several documents."""

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

# default of generate() if neither the model nor the caller sets it
DEFAULT_TOP_K = 50


class Session:
    """A model with one cache of a method, batch size 1.

    Args:
        model: loaded model.
        method: method of the cache.
        tokenizer: tokenizer of the model, needed only by `generate`.
        cache, ids: cache that has already seen the token ids `ids`; None makes an empty one.
    """

    def __init__(
        self, model: Any, method: Method, tokenizer: Any = None, cache: Any = None, ids: Sequence[int] = ()
    ) -> None:
        self.model, self.method, self.tokenizer = model, method, tokenizer
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
            ids: token ids that follow the tokens seen.
            keep: number of last positions whose logits are returned.

        Returns:
            Logits, [keep, vocabulary] in the model's dtype.
        """
        positions = torch.arange(self.seen, self.seen + len(ids))
        return self._run(ids, positions, None, keep)

    def ask(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Runs the model on several independent continuations of the tokens seen.

        The cache cannot be used afterwards, so call it on a `branch`. If all layers attend to all tokens and attention
        takes a bool mask, one forward runs all continuations, separated by the mask. The logits are the same.

        Returns:
            Logits of each continuation, [tokens, vocabulary].
        """
        at_once = self.method.asks_at_once and attends_fully(self.model)
        if not at_once or attention_of(self.model.config) != "sdpa" or len(texts) == 1:
            return [self.branch().forward(ids, keep=len(ids)) for ids in texts]
        sizes = [len(ids) for ids in texts]
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        # adds a last token that sees all others, as tokens hidden from the last one would count as padding
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
        """Generates text after `ids`, which follow the tokens seen, and returns it without special tokens.

        Args:
            ids: token ids that follow the tokens seen.
            max_new_tokens: maximum number of generated tokens.
            options: options of Transformers' `generate()`, for example to sample; greedy by default.
        """
        if self.method.drops_tokens:
            return decode_by_forwards(self, ids, max_new_tokens, options)
        whole = [*self.ids, *ids]
        prompt = torch.tensor([whole], device=self.model.device)
        options = {"max_new_tokens": max_new_tokens, **options}
        written = _generated(self, prompt, torch.ones_like(prompt), options)[0].tolist()
        # the last generated token is not run through the model
        self.ids = written[: self.cache.get_seq_length()]
        return self.tokenizer.decode(written[len(whole) :], skip_special_tokens=True)

    @torch.no_grad()
    def _run(self, ids: Sequence[int], positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        device = self.model.device
        with self.method.attached(self.model, self.cache):
            output = self.model(
                input_ids=torch.tensor([list(ids)], device=device),
                attention_mask=None if mask is None else mask.to(device),
                # explicit, as a cache that drops tokens must not change later positions
                position_ids=positions[None].to(device),
                **passing(self.cache),
                use_cache=True,
                logits_to_keep=keep,
            )
        self.ids += ids
        return output.logits[0, -keep:]

    def branch(self) -> Session:
        """Makes a session that continues from here without changing this one."""
        return Session(self.model, self.method, self.tokenizer, self.method.branch(self.cache), self.ids)

    def held(self) -> HeldBytes:
        return self.method.held(self.cache)


class Batch:
    """A model with one cache of a method for several left-padded documents; the method must have `batches`."""

    def __init__(self, model: Any, method: Method, tokenizer: Any) -> None:
        self.model, self.method, self.tokenizer = model, method, tokenizer
        self.cache = method.new_cache(model)
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad = next(token for token in known if token is not None)
        # tokens that the cache has seen, [documents, tokens], and 1 for those that are not padding
        self.ids: Tensor | None = None
        self.mask: Tensor | None = None
        # number of tokens that a separate cache would have seen of each document
        self.seen: list[int] = []

    @torch.no_grad()
    def forward(self, prompts: Sequence[Sequence[int]]) -> None:
        """Runs the model on further tokens of each document."""
        before = self._add(prompts)
        # as in generate(), padding takes no position
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
        """Generates text after each of `prompts`, as `Session.generate` does. It must be the last call."""
        self._add(prompts)
        length = self.ids.shape[1]
        options = {"max_new_tokens": max_new_tokens, "pad_token_id": self.pad, **options}
        written = _generated(self, self.ids, self.mask, options)[:, length:]
        counts = self._written(written)
        # the last generated token is not run through the model
        self.seen = (self.mask.sum(-1) + counts - 1).tolist()
        self.mask = torch.cat([self.mask, torch.ones_like(written)], dim=1)
        return [
            self.tokenizer.decode(row[:count], skip_special_tokens=True) for row, count in zip(written, counts.tolist())
        ]

    def held(self) -> list[HeldBytes]:
        """Returns the memory of each document after `generate`: its share of the cache by tokens.

        A document counts with the tokens it would have alone, without padding and without tokens after its end while
        others are still generated. Bytes of stored padding belong to no document.
        """
        whole, length = self.method.held(self.cache), self.cache.get_seq_length()
        stored = length * len(self.seen) if self.method.stores_padding else int(self.mask[:, :length].sum())
        return [whole.share(tokens / stored) for tokens in self.seen]

    def _add(self, prompts: Sequence[Sequence[int]]) -> int:
        """Appends left-padded `prompts`, and returns the number of tokens before them."""
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
        """Returns the number of generated tokens of each document, its end token included, [documents]."""
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
    """Generates text like `generate()`, one forward per token, for caches that do not count the tokens they drop.

    Args:
        session: session whose cache is used.
        ids: token ids that follow the tokens seen.
        max_new_tokens: maximum number of generated tokens.
        options: `do_sample` and fields of `GenerationConfig`; other fields are the model's.

    Raises:
        ValueError: an option is not a field of `GenerationConfig`.
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
