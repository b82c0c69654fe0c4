"""Generates from one prompt twice, with a dense cache and with DiffKV, token by token."""

from __future__ import annotations

import collections.abc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Union

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_diffkv.cache.diffkv_cache import DiffKVCache
from hf_diffkv.cache.report import MemoryReport, held_bytes
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.evaluation.comparison import Agreement
from hf_diffkv.plot.pieces import pieces_of_ids, pieces_of_text
from hf_diffkv.running.models import HUB_IDS, resolve_model
from hf_diffkv.running.side_by_side import EXPECTED_ERRORS, bytes_of_layers
from hf_diffkv.running.talk import chat_turns

from .settings import setting_of_ratio, settings_for
from .streaming import StreamedStep, layers_of, stream_steps

DEFAULT_MODEL, BUNDLED_MODEL = "smollm2", "tiny-lm"
REFRESH_SECONDS = 0.1


class InputError(Exception):
    """Signals an error that the user can correct; the message says how."""


@dataclass
class CacheRun:
    """State of a run with one cache.

    Attributes:
        text: generated text.
        tokens: ids of the generated text.
        arrivals: time of the start of generation, then of each token's arrival.
        layers: number of the model's layers that have read the prompt.
        held: points of the memory line, from (0, 0) on: tokens per layer, as a mean over all layers, and bytes of the
            cache at that time.
        cache_bytes: bytes of the cache at the end.
        rungs: share of rows at the precise rung, by compressed layer; empty if rows are not lowered.
        max_bytes: budget of the cache; None without one.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    layers: int = 0
    held: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    cache_bytes: int = 0
    rungs: tuple[float, ...] = ()
    max_bytes: int | None = None

    @property
    def prompt_seconds(self) -> float:
        return self.arrivals[1] - self.arrivals[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed without the first token; None if there was no other."""
        steps = len(self.arrivals) - 2
        return steps / (self.arrivals[-1] - self.arrivals[1]) if steps > 0 else None


@dataclass(frozen=True)
class Result:
    """Both runs, and where DiffKV keeps each token.

    Attributes:
        pieces: text of each token that the cache has seen; the first `prompt_tokens` are the prompt.
        selects: whether tokens have levels; otherwise all tokens of a head are alike.
        levels: int8 [kv_heads, seen] by layer index, coded like `DiffKVCache.levels`; empty if tokens have no levels.
        element_bits: bits of an element of an uncompressed key or value.
    """

    dense: CacheRun
    compressed: CacheRun
    agreement: Agreement
    memory: MemoryReport
    pieces: list[str]
    prompt_tokens: int
    selects: bool
    levels: dict[int, Tensor]
    element_bits: int


@dataclass(frozen=True)
class Request:
    """A checked request: ids int64 [1, tokens], text of each prompt token."""

    ids: Tensor
    pieces: list[str]
    max_new_tokens: int
    config: DiffKVConfig

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.ids.shape[1]


# both sides, with the result in the last item; must be closed if left early
Steps = collections.abc.Generator[tuple[CacheRun, CacheRun, Union[Result, None]], None, None]


@dataclass(frozen=True)
class Entered:
    """Input of a visitor.

    Attributes:
        text: prompt to continue. With `chat`, it is the user's message and gets the model's chat template.
        setting: name of `config` on the page.
        system: system message of a chat; empty leaves it to the template.
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
        title: displayed name of the model.
        chats: whether the model has a chat template.
        settings: settings that visitors choose from.
        num_layers: number of layers that report when they have read the prompt.

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
        except EXPECTED_ERRORS as error:
            raise InputError(f"cannot use the model {name}: {' '.join(str(error).split())}") from error
        if not self.layers or not self.tokenizer.is_fast:
            missing = "layer of plain full attention" if not self.layers else "fast tokenizer"
            raise InputError(f"cannot use the model {name}: it has no {missing}.")
        self.settings = settings_for(self.model)
        self._max_bytes: int | str | None = None
        self.num_layers = len(layers_of(self.model))
        config = self.model.config.get_text_config(decoder=True)
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.chats = bool(self.tokenizer.chat_template)
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        # first calls pay for thread pools and kernels
        warm_up = Request(torch.arange(8, device=device)[None] + 4, [""] * 8, 3, DiffKVConfig(window=1))
        for _ in self.run(warm_up):
            pass

    def offer_ratio(self, ratio: float) -> str:
        """Puts a setting of at most `ratio` first, and returns its name. Raises `InputError` if it is impossible."""
        name = f"ratio {ratio:g}"
        try:
            self.settings = {name: setting_of_ratio(self.model, ratio), **self.settings}
        except ValueError as error:
            raise InputError(str(error)) from error
        return name

    def limit_to(self, max_bytes: int | str | None) -> None:
        """Gives all caches a budget, in bytes or as a share such as "80%" of what is free; None leaves each its own."""
        self._max_bytes = max_bytes

    def prepare(self, entered: Entered) -> Request:
        """Checks what the visitor entered.

        Raises:
            InputError: nothing to continue, half a character, a text that is too long, or a failing chat template.
        """
        if not entered.text.strip():
            raise InputError("The prompt is empty; enter a text to continue.")
        if not entered.max_new_tokens:
            raise InputError("There is nothing to generate; set tokens to at least 1.")
        text = entered.text
        try:
            # browsers send half a character, such as a broken emoji, unchanged
            (text + entered.system).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError("The text has half a character, such as a broken emoji; delete it.") from error
        if entered.chat:
            try:
                text = chat_turns(self.tokenizer, [text], entered.system.strip() or None)[0]
            except Exception as error:  # from jinja2, from a template, or from `chat_turns`
                raise InputError(f"The chat template cannot be used: {' '.join(str(error).split())}") from error
        ids, pieces = pieces_of_text(self.tokenizer, text, add_special_tokens=not entered.chat)
        if self.limit is not None and len(ids) + entered.max_new_tokens > self.limit:
            raise InputError(
                f"The prompt has {len(ids):,} tokens and {entered.max_new_tokens} are to be generated, but the model's "
                f"limit is {self.limit:,} in total; shorten the prompt or lower tokens."
            )
        prompt = torch.tensor([ids], device=self.model.device)
        config = entered.config if self._max_bytes is None else replace(entered.config, max_bytes=self._max_bytes)
        return Request(prompt, pieces, entered.max_new_tokens, config)

    def run(self, task: Request) -> Steps:
        """Yields both runs, one after the other so that neither slows the other down; the last item has the result.

        Raises:
            InputError: the model or the machine failed.
        """
        dense, compressed = CacheRun(), CacheRun()
        try:
            cache: Any = DynamicCache(config=self.model.config)
            for _ in self._follow(dense, task, cache, bytes_of_layers):
                yield dense, compressed, None
            dense.cache_bytes = bytes_of_layers(cache)
            cache = DiffKVCache(self.model.config, task.config)
            for _ in self._follow(compressed, task, cache, held_bytes):
                compressed.max_bytes = budget_in_bytes(cache)
                yield dense, compressed, None
        except EXPECTED_ERRORS as error:
            raise InputError(" ".join(str(error).split()) or type(error).__name__) from error
        memory = cache.memory()
        compressed.max_bytes, compressed.rungs = memory.max_bytes, precise_shares(memory)
        compressed.cache_bytes = memory.bytes
        pieces = task.pieces + pieces_of_ids(self.tokenizer, compressed.tokens[:-1], skip_special_tokens=True)
        selects = task.config.selects
        chosen = cache.compressed_layers() if selects else []
        levels = {layer_idx: cache.levels(layer_idx)[0].cpu() for layer_idx in chosen}
        agreement = Agreement.of([compressed.tokens], [dense.tokens])
        bits = 8 * self.model.dtype.itemsize
        result = Result(
            dense, compressed, agreement, memory, pieces, len(task.pieces), selects, levels, element_bits=bits
        )
        yield dense, compressed, result

    def _follow(self, side: CacheRun, task: Request, cache: Any, held: Callable[[Any], int]) -> Iterator[None]:
        """Fills `side` while the model generates. Yields if there is something new, or has been nothing for a while."""
        side.arrivals.append(time.perf_counter())
        yield
        shown = 0.0
        steps = stream_steps(self.model, task.ids, cache, task.max_new_tokens, lambda: held(cache))
        with closing(steps):
            for step in steps:
                if step is not None:
                    self._note(side, step, task.tokens)
                    if step.seconds - shown <= REFRESH_SECONDS:
                        continue
                    shown = step.seconds
                side.text = self._decode(side.tokens)
                yield
        side.text = self._decode(side.tokens)
        yield

    def _note(self, side: CacheRun, step: StreamedStep, prompt_tokens: int) -> None:
        side.layers = step.layers
        if step.token is None:
            read = prompt_tokens * step.layers / self.num_layers
        else:
            # a token enters the cache with the next one
            read = prompt_tokens + len(side.tokens)
            side.tokens.append(step.token)
            side.arrivals.append(step.seconds)
        side.held.append((read, step.bytes))

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def precise_shares(memory: MemoryReport) -> tuple[float, ...]:
    """Returns the share of rows at the precise rung, by compressed layer; empty if rows are not lowered."""
    if memory.until_full is None:
        return ()
    return tuple(
        sum(name == memory.until_full for name in layer.precisions) / len(layer.precisions) for layer in memory.layers
    )


def budget_in_bytes(cache: DiffKVCache) -> int | None:
    """Returns the budget of a cache that holds tokens; None without one, or before the first tokens."""
    stores = cache.stores.all
    max_bytes = stores[0].config.max_bytes if stores else None
    return None if max_bytes is None else int(max_bytes)


def load(name: str | None) -> tuple[Generator, str]:
    """Returns the model `name` and an empty note; without a name, SmolLM2, or else tiny-lm and a note.

    Raises:
        InputError: no model can be used.
    """
    if name is not None:
        return Generator(name), ""
    try:
        return Generator(DEFAULT_MODEL), ""
    except InputError as error:
        missing = f"{HUB_IDS[DEFAULT_MODEL]} is not available here"
        try:
            generator = Generator(BUNDLED_MODEL)
        except InputError:
            raise InputError(f"{missing}; give --model a folder or a Hub id ({error})") from error
        return generator, f"{missing}; this is {BUNDLED_MODEL} instead, a small model from this project"
