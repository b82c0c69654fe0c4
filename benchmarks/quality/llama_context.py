"""A llama.cpp cache with given types of keys and values, using llama-cpp-python's functions.

Flash attention is on, because quantised values need it. All else is llama.cpp's default: for example, it rotates keys
and values before quantising them. Only `LlamaCpp` needs the package, so the types are known in any environment.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_diffkv.evaluation.errors import EvaluationError, one_line, unknown

FAMILY = "llama-cpp"
# numbers that llama.cpp's types quantise together
BLOCK = 32
# bytes of a block, and of the codes in it, by type
TYPES = {"f16": (64, 64), "q8_0": (34, 32), "q5_0": (22, 20), "q4_0": (18, 16)}
# tokens that llama.cpp reads at once, its default
CHUNK_TOKENS = 512
THREADS = 2
# level of errors in llama.cpp's log
ERROR_LEVEL = 4
# what a state contains besides keys and values: maximum bytes per token, per layer and in total
STATE_BYTES = (16, 32, 64)


@dataclass(frozen=True)
class CacheTypes:
    """Types of a cache, names of `TYPES`.

    Attributes:
        keys, values: type of all keys and of all values.
    """

    keys: str
    values: str


EXACT = CacheTypes("f16", "f16")


def parse_types(options: Sequence[str]) -> CacheTypes:
    """Parses the options of a method: `q8_0`, or `q8_0/q4_0` for keys and values. Raises `EvaluationError`."""
    if len(options) != 1:
        raise EvaluationError(
            f"method {FAMILY!r} takes one type, or one for keys and one for values: {FAMILY}:q8_0, {FAMILY}:q8_0/q4_0."
        )
    names = options[0].split("/")
    for name in names:
        if name not in TYPES:
            raise unknown("type of llama.cpp's cache", name, TYPES)
    if len(names) > 2:
        raise EvaluationError(f"method {FAMILY!r} takes a type for keys and one for values, not {options[0]!r}.")
    return CacheTypes(names[0], names[-1])


@dataclass(frozen=True)
class Held:
    """Memory used by the tokens in a cache.

    Attributes:
        bytes: bytes of their keys and values.
        payload_bytes: bytes of the codes alone.
    """

    bytes: int
    payload_bytes: int


@dataclass(frozen=True)
class Shape:
    """Shape of a model's cache; all layers keep all tokens.

    Attributes:
        layers: number of layers.
        keys, values: number of elements that a layer stores for a token's keys and for its values.
    """

    layers: int
    keys: int
    values: int

    def held(self, types: CacheTypes, tokens: int) -> Held:
        """Returns the memory of `tokens` tokens."""
        parts = ((self.keys, TYPES[types.keys]), (self.values, TYPES[types.values]))
        whole, codes = (sum(numbers // BLOCK * size[part] for numbers, size in parts) for part in (0, 1))
        return Held(self.layers * tokens * whole, self.layers * tokens * codes)


class LlamaCpp:
    """A model in llama.cpp that makes caches for it.

    Args:
        gguf: path of the model's GGUF file.
        threads: number of threads; None takes `THREADS`.

    Raises:
        EvaluationError: llama.cpp cannot read the file, or does not keep all tokens of all layers.
    """

    def __init__(self, gguf: Path, threads: int | None = None) -> None:
        self.threads = threads or THREADS
        # threads waiting for each other yield their cores to other programs; read when the library is loaded
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import llama_cpp

        self.api: Any = llama_cpp
        self.errors: list[str] = []
        # llama.cpp calls this as long as the process runs
        self._log = llama_cpp.llama_log_callback(self._keep_error)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), parameters)
        if not self.model:
            raise EvaluationError(f"llama.cpp cannot read {gguf}: {self.take_errors()}")
        if llama_cpp.llama_model_n_swa(self.model):
            raise EvaluationError("llama.cpp is measured on models whose layers all keep all tokens.")
        self.vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.shape = self._shape()

    def _keep_error(self, level: int, text: bytes, data: Any) -> None:
        if level == ERROR_LEVEL:
            self.errors.append(one_line(text.decode(errors="replace")))

    def take_errors(self) -> str:
        """Returns the errors that llama.cpp has logged since the last call."""
        said, self.errors = "; ".join(self.errors) or "it gives no reason", []
        return said

    def _shape(self) -> Shape:
        api, model = self.api, self.model
        channels = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
        family = self._setting("general.architecture")
        heads = api.llama_model_n_head_kv(model)
        keys, values = (int(self._setting(f"{family}.attention.{x}_length") or channels) for x in ("key", "value"))
        return Shape(api.llama_model_n_layer(model), heads * keys, heads * values)

    def _setting(self, name: str) -> str:
        """Returns an entry of the GGUF file, or an empty string."""
        buffer = ctypes.create_string_buffer(256)
        size = self.api.llama_model_meta_val_str(self.model, name.encode(), buffer, len(buffer))
        return buffer.value.decode() if size >= 0 else ""

    def new_cache(self, types: CacheTypes, tokens: int) -> LlamaCache:
        """Makes an empty cache for `tokens` tokens. Raises `RuntimeError` if llama.cpp cannot."""
        api = self.api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = parameters.n_ubatch = CHUNK_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.type_k, parameters.type_v = (
            getattr(api, f"GGML_TYPE_{name.upper()}") for name in (types.keys, types.values)
        )
        context = api.llama_init_from_model(self.model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp makes no cache of {types.keys} and {types.values}: {self.take_errors()}")
        return LlamaCache(self, context, types)


class LlamaCache:
    """A llama.cpp context with one sequence.

    Args:
        program: model of the context.
        context: the context, which `close` frees.
        types: types of its keys and values.
    """

    def __init__(self, program: LlamaCpp, context: Any, types: CacheTypes) -> None:
        self.program, self.context, self.types = program, context, types
        self.tokens = 0

    def forward(self, ids: Sequence[int], keep: int = 1) -> np.ndarray:
        """Runs the model on further tokens.

        Returns:
            Logits of the last `keep` positions, [keep, vocabulary].
        """
        rows: list[np.ndarray] = []
        for start in range(0, len(ids), CHUNK_TOKENS):
            part = ids[start : start + CHUNK_TOKENS]
            rows += self._decode(part, len(ids) - keep - start)
        return np.stack(rows)

    def _decode(self, ids: Sequence[int], first: int) -> list[np.ndarray]:
        """Runs the model on one chunk and returns the logits of its positions from `first` on."""
        api = self.program.api
        batch = api.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for index, token in enumerate(ids):
                batch.token[index], batch.pos[index] = token, self.tokens + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
                batch.logits[index] = index >= first
            code = api.llama_decode(self.context, batch)
        finally:
            api.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}: {self.program.take_errors()}")
        self.tokens += len(ids)
        return [self._logits(index) for index in range(max(first, 0), len(ids))]

    def _logits(self, index: int) -> np.ndarray:
        found = self.program.api.llama_get_logits_ith(self.context, index)
        return np.ctypeslib.as_array(found, shape=(self.program.vocabulary,)).copy()

    def forget(self, tokens: int) -> None:
        """Removes all but the first `tokens` tokens."""
        api = self.program.api
        if not api.llama_memory_seq_rm(api.llama_get_memory(self.context), 0, tokens, -1):
            raise RuntimeError("llama.cpp cannot remove the last tokens of its cache.")
        self.tokens = tokens

    def held(self) -> Held:
        """Returns the memory of the tokens in the cache.

        Raises:
            RuntimeError: the sequence that llama.cpp would save has a different size.
        """
        held = self.program.shape.held(self.types, self.tokens)
        saved = self.program.api.llama_state_seq_get_size(self.context, 0)
        of_token, of_layer, of_all = STATE_BYTES
        if not 0 <= saved - held.bytes <= of_token * self.tokens + of_layer * self.program.shape.layers + of_all:
            raise RuntimeError(
                f"llama.cpp holds {saved} bytes for {self.tokens} tokens where {held.bytes} are expected."
            )
        return held

    def close(self) -> None:
        self.program.api.llama_free(self.context)
