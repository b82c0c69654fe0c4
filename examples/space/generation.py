"""One prompt generated twice, with a dense cache and with DiffKV, token by token."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_diffkv import DiffKVCache, DiffKVConfig, MemoryReport
from hf_diffkv.agreement import Agreement
from hf_diffkv.compare import EXPECTED
from hf_diffkv.pieces import pieces_of_ids, pieces_of_text

REFRESH_SECONDS = 0.1


class InputError(Exception):
    """Something the user can put right; the message says how."""


@dataclass
class Side:
    """What one cache has done so far.

    Attributes:
        text: generated text; tokens: its ids.
        arrivals: when generation started, then when each token came.
        cache_bytes: what the cache holds at the end.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    cache_bytes: int = 0

    @property
    def prompt_seconds(self) -> float:
        return self.arrivals[1] - self.arrivals[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, the first token left out; None if there was no other."""
        steps = len(self.arrivals) - 2
        return steps / (self.arrivals[-1] - self.arrivals[1]) if steps > 0 else None


@dataclass(frozen=True)
class Result:
    """Both runs, and where DiffKV keeps each token.

    Attributes:
        pieces: text of each token that the cache has seen; the first `prompt_tokens` are the prompt.
        levels: by layer index int8 [kv_heads, seen], coded as by `DiffKVCache.levels`.
    """

    dense: Side
    compressed: Side
    agreement: Agreement
    memory: MemoryReport
    pieces: list[str]
    prompt_tokens: int
    levels: dict[int, Tensor]


@dataclass(frozen=True)
class Task:
    """A checked request: ids int64 [1, tokens], text of each prompt token."""

    ids: Tensor
    pieces: list[str]
    max_new_tokens: int
    config: DiffKVConfig


class Generator:
    """A loaded model that generates with both caches.

    Raises:
        InputError: the model cannot be loaded, or does not work with DiffKV.
    """

    def __init__(self, name: str) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.layers = DiffKVCache(AutoConfig.from_pretrained(name)).compressed_layers()
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
        except EXPECTED as error:
            raise InputError(f"cannot use the model {name}: {' '.join(str(error).split())}") from error
        if not self.layers or not self.tokenizer.is_fast:
            missing = "layer of plain full attention" if not self.layers else "fast tokenizer"
            raise InputError(f"cannot use the model {name}: it has no {missing}.")
        config = self.model.config.get_text_config(decoder=True)
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        self.attention = config._attn_implementation
        # first calls pay for thread pools and kernels
        warm_up = Task(torch.arange(8, device=device)[None] + 4, [""] * 8, 3, DiffKVConfig(window=1))
        for _ in self.run(warm_up):
            pass

    def prepare(self, prompt: str, max_new_tokens: int | None, config: DiffKVConfig) -> Task:
        """Checks what the user entered. Raises `InputError` for nothing to continue, or too long a text."""
        if not prompt.strip():
            raise InputError("The prompt is empty; enter a text to continue.")
        if not max_new_tokens:
            raise InputError("Nothing is to be generated; set tokens to at least 1.")
        ids, pieces = pieces_of_text(self.tokenizer, prompt)
        if self.limit is not None and len(ids) + max_new_tokens > self.limit:
            raise InputError(
                f"The prompt has {len(ids):,} tokens and {max_new_tokens} are to be generated, but the model takes "
                f"{self.limit:,} together; shorten the prompt or lower tokens."
            )
        return Task(torch.tensor([ids], device=self.model.device), pieces, max_new_tokens, config)

    def run(self, task: Task) -> Iterator[tuple[Side, Side, Result | None]]:
        """Both runs, one after the other so that neither slows the other down; the last item carries the result.

        Raises:
            InputError: the model or the machine could not do it.
        """
        dense, compressed = Side(), Side()
        try:
            self.model.set_attn_implementation(self.attention)
            cache: Any = DynamicCache(config=self.model.config)
            for _ in self._follow(dense, task, cache):
                yield dense, compressed, None
            dense.cache_bytes = _tensor_bytes(cache)
            cache = DiffKVCache(self.model.config, task.config)
            for _ in self._follow(compressed, task, cache):
                yield dense, compressed, None
        except EXPECTED as error:
            raise InputError(" ".join(str(error).split()) or type(error).__name__) from error
        memory = cache.memory()
        compressed.cache_bytes = memory.bytes
        pieces = task.pieces + pieces_of_ids(self.tokenizer, compressed.tokens[:-1], skip_special_tokens=True)
        levels = {layer_idx: cache.levels(layer_idx)[0].cpu() for layer_idx in cache.compressed_layers()}
        agreement = Agreement.of([compressed.tokens], [dense.tokens])
        yield dense, compressed, Result(dense, compressed, agreement, memory, pieces, len(task.pieces), levels)

    def _follow(self, side: Side, task: Task, cache: Any) -> Iterator[None]:
        """Fills `side` while the model generates; yields whenever there is something new to show."""
        side.arrivals.append(time.perf_counter())
        shown = 0.0
        for token, arrived in stream_tokens(self.model, task, cache):
            side.tokens.append(token)
            side.arrivals.append(arrived)
            if arrived - shown > REFRESH_SECONDS:
                shown, side.text = arrived, self._decode(side.tokens)
                yield
        side.text = self._decode(side.tokens)
        yield

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _tensor_bytes(cache: DynamicCache) -> int:
    """What all layers hold, linear ones included."""
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


class _Stream(BaseStreamer, StoppingCriteria):
    """Hands tokens from the generating thread to another one, which may stop it."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.prompt_came = False

    def put(self, value: Tensor) -> None:
        if self.prompt_came:
            self.items.put((int(value), time.perf_counter()))
        self.prompt_came = True

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), device=input_ids.device)


def stream_tokens(model: Any, task: Task, cache: Any) -> Iterator[tuple[int, float]]:
    """Greedy tokens as they come, each with its time. Closing the iterator stops the model; its errors are raised."""
    stream = _Stream()

    def work() -> None:
        try:
            model.generate(
                task.ids,
                attention_mask=torch.ones_like(task.ids),
                past_key_values=cache,
                max_new_tokens=task.max_new_tokens,
                do_sample=False,
                streamer=stream,
                stopping_criteria=[stream],
            )
            stream.items.put(None)
        except BaseException as error:
            stream.items.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while (item := stream.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stream.stopped.set()
        thread.join()
