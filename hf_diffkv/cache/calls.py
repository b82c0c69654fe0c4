"""Running `generate()` calls, and checks that each uses the cache it was given."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor

from ..compat import cache_argument, text_length
from .diffkv_cache import DiffKVCache
from .errors import CacheNotUsedError
from .turns import module_frames
from .usage import CacheInUseError, in_use

_thread = threading.local()


class Call:
    """One `generate()` call.

    Args:
        model: model that generates.
        chooses: whether a custom generation function (`custom_generate`) runs, which may use any cache.

    Attributes:
        cache: cache that the call must use; None before there is one, or with one of Transformers' own caches.
        length: number of tokens of the whole prompt, cached ones included; None if unknown.
        in_chunks: whether the prompt is being prefilled in several forwards.
    """

    def __init__(self, model: Any, chooses: bool = False) -> None:
        self.model, self.chooses = model, chooses
        self.cache: DiffKVCache | None = None
        self.length: int | None = None
        self.in_chunks = False
        # the claim on a cache, and whether the cache was recording before it
        self._claimed: tuple[DiffKVCache, Any, bool] | None = None
        # tokens the cache had seen before the call, and before the last prepared forward
        self._at_start = self._before = 0
        self._checked = False

    def claim(self, cache: DiffKVCache, run: Any) -> None:
        """Claims a cache for the call.

        Raises:
            CacheInUseError: raised by `Usage.claim`, or an enclosing call uses the cache.
        """
        if any(call.cache is cache and not call.chooses for call in _thread.calls if call is not self):
            raise in_use()
        cache.usage.claim(self.model, run)
        self._claimed = cache, run, cache.stores.recording or getattr(run, "is_assistant", False)
        # `generate()` may run within a module, which then does not indicate a forward
        cache.stores.turns.outer = module_frames(sys._getframe())

    def release(self, failed: bool) -> None:
        """Releases the claimed cache, and ends a recording that only the call needed.

        Args:
            failed: whether the call ended with an error, after which the cache may not be complete.
        """
        if self._claimed is None:
            return
        cache, run, recorded = self._claimed
        cache.stores.turns.outer = 0
        try:
            if cache.stores.recording and not recorded:
                with suppress(Exception) if failed else nullcontext():
                    cache.stop_recording()
        finally:
            cache.usage.release(run, is_empty=cache.get_seq_length() == 0)

    def use(self, cache: DiffKVCache, length: int | None) -> None:
        """Sets the call's cache and the length of its whole prompt."""
        self.cache, self.length = cache, length
        self._at_start = self._before = cache.get_seq_length()

    def prepare(self, given: Any, input_ids: Any, arguments: Mapping[str, Any]) -> bool:
        """Checks, before each forward, the cache that a model is about to use.

        Models with two sets of rotary factors (Phi-3, PhiMoE, Phi-4-multimodal) drop the cache once the text grows
        longer than `original_max_position_embeddings`, and recompute the whole text. The cache is then emptied.

        Args:
            given: cache that the model is about to use.
            input_ids: int64 [batch, tokens], all ids that `generate()` knows.
            arguments: keyword arguments of `prepare_inputs_for_generation`.

        Returns:
            Whether the model must be given the call's cache and all of `input_ids`.

        Raises:
            CacheNotUsedError: the model would use another cache or none, and the text cannot be recomputed.
            CacheInUseError: the cache has been emptied since the last forward.
            ValueError: `input_ids` differ from the tokens that the cache holds.
        """
        cache, dropped = self.cache, False
        if cache is None or self.chooses and (given is not None or arguments.get("use_cache") is False):
            return False
        if given is not None and given is not cache:
            raise CacheNotUsedError(
                f"{self._name} replaced the DiffKVCache passed to generate() with a {type(given).__name__}; it cannot "
                "use DiffKVCache."
            )
        if given is None:
            dropped = self._drops_it(cache, input_ids, arguments)
        elif self._checked and not cache.get_seq_length():
            raise CacheInUseError(
                "the cache was emptied while generate() was using it; call cache.reset() after the call has returned."
            )
        self._before = cache.get_seq_length()
        return dropped

    def _drops_it(self, cache: DiffKVCache, input_ids: Any, arguments: Mapping[str, Any]) -> bool:
        seen = cache.get_seq_length()
        if not seen:
            # nothing is lost
            return True
        text_config = self.model.config.get_text_config(decoder=True)
        bound = getattr(text_config, "original_max_position_embeddings", None)
        known = input_ids.shape[1] if isinstance(input_ids, Tensor) and input_ids.ndim == 2 else 0
        if bound is None or not seen <= bound < known:
            if self.chooses:
                return False
            raise CacheNotUsedError(
                f"{self._name} dropped the DiffKVCache passed to generate(), with its {seen} tokens; it cannot use "
                "DiffKVCache."
            )
        length = text_length(arguments)
        if self.in_chunks or length not in (None, known) or arguments.get("inputs_embeds") is not None:
            raise CacheNotUsedError(
                f"the text grows longer than original_max_position_embeddings={bound}, where {self._name} recomputes "
                f"all of it, but it was given only {known} tokens and a cache of {seen}; pass the whole text as "
                "input_ids, earlier tokens included, without prefill_chunk_size."
            )
        cache.held_tokens.check(input_ids, arguments.get("attention_mask"), seen)
        cache.start_over()
        return True

    def missing(self, input_ids: Tensor, attention_mask: Tensor | None) -> int | None:
        """Returns the number of tokens that a filled cache lacks, or None if it lacks all those given to the forward.

        Assisted decoding gives the cache the whole text again, with the first candidates at its end.

        Args:
            input_ids: int64 [batch, tokens] of the first forward.
            attention_mask: [batch, tokens], or None.

        Raises:
            ValueError: the text does not begin with the tokens that the cache holds.
        """
        seen = 0 if self.cache is None else self.cache.get_seq_length()
        if not seen or self.length is None or input_ids.shape[1] < self.length:
            return None
        self.cache.held_tokens.check(input_ids, attention_mask, seen)
        return input_ids.shape[1] - seen

    def check(self, outputs: Mapping[str, Any]) -> None:
        """Checks, after each forward, that the model used the cache.

        Raises:
            CacheNotUsedError: the model used another cache, or gave it none of its tokens.
        """
        cache = self.cache
        if cache is None or self.chooses:
            return
        returned = outputs.get(cache_argument())
        if returned is not None and returned is not cache:
            raise CacheNotUsedError(
                f"{self._name} was given a DiffKVCache but used a {type(returned).__name__}; it cannot use DiffKVCache."
            )
        # assisted decoding has already taken back all tokens but one
        self._check_longer(self._before)
        self._checked = True

    def end(self) -> None:
        """Raises `CacheNotUsedError` if the cache holds no tokens of a call that is about to return."""
        if self.cache is not None and not (self._checked or self.chooses):
            self._check_longer(self._at_start)

    def _check_longer(self, before: int) -> None:
        if self.cache is not None and self.cache.get_seq_length() <= before:
            raise CacheNotUsedError(
                f"{self._name} computed tokens without passing their keys and values to the DiffKVCache given to "
                "generate(); it cannot use DiffKVCache."
            )

    @property
    def _name(self) -> str:
        return type(self.model).__name__


@contextmanager
def under_way(model: Any, chooses: bool = False) -> Iterator[Call]:
    """Yields a new `generate()` call on `model`, which `current_call` finds in this thread within the block."""
    calls = _thread.__dict__.setdefault("calls", [])
    call = Call(model, chooses)
    calls.append(call)
    failed = True
    try:
        yield call
        failed = False
    finally:
        calls.remove(call)
        call.release(failed)


def current_call(model: Any) -> Call | None:
    """Returns the innermost running `generate()` call on `model` in this thread, or None."""
    return next((call for call in reversed(getattr(_thread, "calls", ())) if call.model is model), None)
