"""One prompt generated twice, with a dense cache and with DiffKV, token by token."""

from __future__ import annotations

import collections.abc
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from ..cache.diffkv_cache import DiffKVCache
from ..cache.report import MemoryReport
from ..compat import attention_of
from ..config import DiffKVConfig
from ..evaluation.comparison import Agreement
from ..evaluation.models import HUB_IDS, resolve_model
from ..evaluation.side_by_side import EXPECTED, bytes_of_layers
from ..evaluation.talk import chat_turns
from ..plot.pieces import pieces_of_ids, pieces_of_text
from .settings import settings_for

DEFAULT_MODEL, BUNDLED_MODEL = "smollm2", "tiny-lm"
REFRESH_SECONDS = 0.1
# how long a caller waits for a token before it can look at what else there is
PATIENCE_SECONDS = 0.2


class InputError(Exception):
    """Something the user can put right; the message says how."""


@dataclass
class CacheRun:
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

    dense: CacheRun
    compressed: CacheRun
    agreement: Agreement
    memory: MemoryReport
    pieces: list[str]
    prompt_tokens: int
    levels: dict[int, Tensor]


@dataclass(frozen=True)
class Request:
    """A checked request: ids int64 [1, tokens], text of each prompt token."""

    ids: Tensor
    pieces: list[str]
    max_new_tokens: int
    config: DiffKVConfig


# both sides, and at the end what came of them; to be closed where it is left before
Steps = collections.abc.Generator[tuple[CacheRun, CacheRun, Union[Result, None]], None, None]


@dataclass(frozen=True)
class Entered:
    """What a visitor entered.

    Attributes:
        text: to be continued; with `chat`, the user's message, which the model's chat template is put around.
        setting: what `config` is called on the page.
        system: the system message of a chat; empty leaves it to the template.
    """

    text: str
    max_new_tokens: int | None
    config: DiffKVConfig
    setting: str
    chat: bool = False
    system: str = ""


class Generator:
    """A loaded model that generates with both caches.

    Args:
        name: Hub id, folder, or short name.

    Attributes:
        title: what to call the model.
        chats: whether it has a chat template.
        settings: what visitors choose from.

    Raises:
        InputError: the model cannot be loaded, or does not work with DiffKV.
    """

    def __init__(self, name: str) -> None:
        self.title = HUB_IDS.get(name, name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            source = resolve_model(name)
            self.layers = DiffKVCache(AutoConfig.from_pretrained(source)).compressed_layers()
            self.tokenizer = AutoTokenizer.from_pretrained(source)
            self.model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(device).eval()
        except EXPECTED as error:
            raise InputError(f"cannot use the model {name}: {' '.join(str(error).split())}") from error
        if not self.layers or not self.tokenizer.is_fast:
            missing = "layer of plain full attention" if not self.layers else "fast tokenizer"
            raise InputError(f"cannot use the model {name}: it has no {missing}.")
        self.settings = settings_for(self.model)
        config = self.model.config.get_text_config(decoder=True)
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.chats = bool(self.tokenizer.chat_template)
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        self.attention = attention_of(config)
        # first calls pay for thread pools and kernels
        warm_up = Request(torch.arange(8, device=device)[None] + 4, [""] * 8, 3, DiffKVConfig(window=1))
        for _ in self.run(warm_up):
            pass

    def prepare(self, entered: Entered) -> Request:
        """Checks what the visitor entered.

        Raises:
            InputError: nothing to continue, too long a text, or a chat template that fails.
        """
        if not entered.text.strip():
            raise InputError("The prompt is empty; enter a text to continue.")
        if not entered.max_new_tokens:
            raise InputError("Nothing is to be generated; set tokens to at least 1.")
        text = entered.text
        if entered.chat:
            try:
                text = chat_turns(self.tokenizer, [text], entered.system.strip() or None)[0]
            except Exception as error:  # of jinja2, as templates raise them, or of `chat_turns`
                raise InputError(f"The chat template cannot be used: {' '.join(str(error).split())}") from error
        ids, pieces = pieces_of_text(self.tokenizer, text, add_special_tokens=not entered.chat)
        if self.limit is not None and len(ids) + entered.max_new_tokens > self.limit:
            raise InputError(
                f"The prompt has {len(ids):,} tokens and {entered.max_new_tokens} are to be generated, but the model "
                f"takes {self.limit:,} together; shorten the prompt or lower tokens."
            )
        prompt = torch.tensor([ids], device=self.model.device)
        return Request(prompt, pieces, entered.max_new_tokens, entered.config)

    def run(self, task: Request) -> Steps:
        """Both runs, one after the other so that neither slows the other down; the last item carries the result.

        Raises:
            InputError: the model or the machine could not do it.
        """
        dense, compressed = CacheRun(), CacheRun()
        try:
            if self.attention is not None:
                self.model.set_attn_implementation(self.attention)
            cache: Any = DynamicCache(config=self.model.config)
            for _ in self._follow(dense, task, cache):
                yield dense, compressed, None
            dense.cache_bytes = bytes_of_layers(cache)
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

    def _follow(self, side: CacheRun, task: Request, cache: Any) -> Iterator[None]:
        """Fills `side` while the model generates; yields whenever there is something new to show, or has not been."""
        side.arrivals.append(time.perf_counter())
        shown = 0.0
        for came in stream_tokens(self.model, task, cache):
            if came is None:
                yield
                continue
            token, arrived = came
            side.tokens.append(token)
            side.arrivals.append(arrived)
            if arrived - shown > REFRESH_SECONDS:
                shown, side.text = arrived, self._decode(side.tokens)
                yield
        side.text = self._decode(side.tokens)
        yield

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


END = object()


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

    def next(self) -> Any:
        """What comes next; None where nothing does for `PATIENCE_SECONDS`."""
        try:
            return self.items.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            return None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.stopped.is_set(), device=input_ids.device)


def stream_tokens(model: Any, task: Request, cache: Any) -> Iterator[tuple[int, float] | None]:
    """Greedy tokens as they come, each with its time; None whenever none has come for a while.

    Closing the iterator stops the model; its errors are raised.
    """
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
            stream.items.put(END)
        except BaseException as error:
            stream.items.put(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while (item := stream.next()) is not END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stream.stopped.set()
        thread.join()


def load(name: str | None) -> tuple[Generator, str]:
    """The model `name` and an empty note; without a name SmolLM2, or tiny-lm and a note where that cannot be had.

    Raises:
        InputError: no model can be used.
    """
    if name is not None:
        return Generator(name), ""
    try:
        return Generator(DEFAULT_MODEL), ""
    except InputError as error:
        missing = f"{HUB_IDS[DEFAULT_MODEL]} cannot be had here"
        try:
            generator = Generator(BUNDLED_MODEL)
        except InputError:
            raise InputError(f"{missing}; give --model a folder or a Hub id ({error})") from error
        return generator, f"{missing}; this is {BUNDLED_MODEL}, a small model of the project, instead"
