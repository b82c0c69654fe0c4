"""Models, caches and contexts for the CPU benchmarks.

A context is filled without running its prompt: every cache is given the same random keys and values, and DiffKV also
gets the significance that its prompt attention would have found. The cost of a later step depends on the number of
tokens at each level, not on their content.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import environment, relative_error
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_diffkv import DiffKVCache, DiffKVConfig
from hf_diffkv.compat import passing
from hf_diffkv.config.presets import PRESETS
from hf_diffkv.evaluation.methods.base import tensor_bytes
from hf_diffkv.native import library
from hf_diffkv.store import Store

ROOT = Path(__file__).parent.parent
FOLDERS = {"tiny-lm": ROOT / "examples/models/tiny-lm", "smollm2": ROOT / "build/models/smollm2"}
RANDOM = "llama-8x128"
MODELS = (*FOLDERS, RANDOM)
DIFFKV = {
    **{f"DiffKV {name}": DiffKVConfig.preset(name) for name in PRESETS},
    "DiffKV K4V2": DiffKVConfig.preset("small", high="K4V2", low="K4V2"),
    "DiffKV K8V4/K4V2": DiffKVConfig("K8V4", "K4V2", metadata_bits=16),
    "DiffKV paper": DiffKVConfig.paper(),
}


def load_model(name: str, dtype: torch.dtype, layers: int) -> PreTrainedModel:
    """Loads one of `MODELS`; `layers` is for the random one, which has Llama-3-8B's shape except for their number.

    Raises:
        FileNotFoundError: the model has not been fetched.
        ValueError: the name is unknown.
    """
    if name not in MODELS:
        raise ValueError(f"{name!r} is none of {', '.join(MODELS)}.")
    if name in FOLDERS:
        if not FOLDERS[name].is_dir():
            raise FileNotFoundError(f"{name} is not in {FOLDERS[name]}; fetch it with `make models`.")
        return AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=dtype).eval()
    return random_llama(
        dtype,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )


def random_llama(dtype: torch.dtype, **sizes: Any) -> PreTrainedModel:
    """A Llama with heads of 128 and a small vocabulary, identical for equal `sizes` (fields of its configuration)."""
    fields = {"vocab_size": 1024, "head_dim": 128, "max_position_embeddings": 1 << 17}
    config = LlamaConfig(**{**fields, **sizes}, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def append_rows(path: Path, about: dict, rows: list[dict]) -> None:
    """Appends results to a JSON Lines file immediately, so that an interrupted run keeps what it has."""
    with path.open("a") as file:
        file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)


def makers(model: PreTrainedModel, tokens: int, wanted: list[str] | None) -> dict[str, Callable[[], Cache]]:
    """Returns a factory for each cache by name.

    Caches whose backend is missing are left out. `tokens` is the capacity of static caches. If `wanted` is given, only
    caches whose name contains one of its parts are kept.
    """
    config = model.config
    made: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=tokens),
    }
    for backend in ("quanto", "hqq"):
        name = f"QuantizedCache {backend} 4 bit"
        if wanted is not None and not any(part in name for part in wanted):
            continue
        try:
            QuantizedCache(backend=backend, config=config, nbits=4)
        except ImportError:
            print(f"{name} is left out: {backend} is not installed", flush=True)
            continue
        made[name] = lambda backend=backend: QuantizedCache(backend=backend, config=config, nbits=4)
    for name, choices in DIFFKV.items():
        made[name] = lambda choices=choices: DiffKVCache(config, choices)
    return {name: make for name, make in made.items() if wanted is None or any(part in name for part in wanted)}


def attention_of(cache: Cache) -> str:
    return "diffkv" if isinstance(cache, DiffKVCache) else "sdpa"


@torch.no_grad()
def step(model: PreTrainedModel, cache: Cache, tokens: Tensor) -> Tensor:
    """Logits [batch, vocabulary] after the last of the tokens [batch, n], from one forward."""
    model.set_attn_implementation(attention_of(cache))
    return model(tokens, **passing(cache), logits_to_keep=1).logits[:, -1]


@torch.no_grad()
def check_lossless(model: PreTrainedModel) -> None:
    """Exits unless the lossless configuration's logits are as close to float32 as DynamicCache's."""
    tokens = torch.randint(3, model.config.vocab_size, (1, 204), generator=torch.Generator().manual_seed(0))
    logits = []
    for cache in (DynamicCache(config=model.config), DiffKVCache(model.config, DiffKVConfig.lossless())):
        parts = (tokens[:, :200], *tokens[:, 200:].split(1, dim=1))
        logits.append(torch.stack([step(model, cache, part) for part in parts], dim=1))
    model.set_attn_implementation("sdpa")
    exact_model = copy.deepcopy(model).float()
    exact = exact_model(tokens, logits_to_keep=5).logits
    dense, lossless = (relative_error(found, exact) for found in logits)
    # rounding differs, so neither bounds the other
    if not lossless <= max(1.5 * dense, 1e-4):
        raise SystemExit(
            f"lossless logits differ from those in float32 by {lossless:.3g}, DynamicCache's by {dense:.3g}; not timed."
        )


def about_machine() -> dict:
    """Describes the processor and software on which results depend."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found = {key: value for key, value in environment(torch.device("cpu")).items() if value is not None}
    found["device"] = names[0] if names else platform.processor()
    return {**found, "instructions": library.instructions()}


@dataclass
class Tokens:
    """Queries, keys and values of all layers, each [batch, heads, tokens, head_dim], and the attention received.

    Attributes:
        received: received attention, float32 [batch, heads, tokens].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    received: Tensor

    @classmethod
    def draw(cls, model: PreTrainedModel, batch: int, tokens: int) -> Tokens:
        """Draws keys with a mean and widely spread significance, as in pretrained models."""
        config = model.config
        heads, dim = config.num_key_value_heads, config.head_dim
        generator = torch.Generator().manual_seed(tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        key = normal(batch, heads, tokens, dim) + 2 * torch.sin(torch.arange(dim))
        value = normal(batch, heads, tokens, dim)
        query = normal(batch, config.num_attention_heads, 1, dim).expand(-1, -1, tokens, -1)
        later = torch.arange(tokens, 0, -1)
        received = later / tokens * torch.exp(1.5 * normal(batch, heads, tokens) - 1.5**2 / 2)
        return cls(*(part.to(model.dtype) for part in (query, key, value)), received)


@torch.no_grad()
def attend_all(model: PreTrainedModel, cache: Cache, new: Tokens) -> None:
    """Passes new tokens to every layer of a cache and attends from them, without the rest of the model."""
    attention = ALL_ATTENTION_FUNCTIONS[attention_of(cache)]
    for index, layer in enumerate(model.model.layers):
        key, value = cache.update(new.key, new.value, index)
        attention(layer.self_attn, new.query, key, value, None, scaling=layer.self_attn.scaling)


@torch.no_grad()
def fill(model: PreTrainedModel, cache: Cache, tokens: Tokens) -> None:
    """Fills every layer of a cache with the tokens."""
    if not isinstance(cache, DiffKVCache):
        for index in range(model.config.num_hidden_layers):
            cache.update(tokens.key, tokens.value, index)
        return

    def found(
        store: Store, layer: int, past: object, query: Tensor, *args: object, **kwargs: object
    ) -> tuple[Any, Any]:
        return torch.zeros_like(query), tokens.received.clone() if store.layout.selects else None

    with mock.patch("hf_diffkv.store.prompt.attend_with_past", found):
        attend_all(model, cache, tokens)


def held_bytes(cache: Cache) -> int:
    """Returns the bytes that a cache holds."""
    return cache.memory().bytes if isinstance(cache, DiffKVCache) else tensor_bytes(cache.layers)
