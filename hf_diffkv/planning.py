"""Estimates of cache size from a model's configuration alone, without loading weights.

The counts include everything a store holds: whole pages, window, page table, free list and counters. They exclude
whatever else a forward needs, mainly activations.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from .cache.supported_models import cache_layers, check_model_config
from .compat import passing
from .config import DiffKVConfig
from .config.latent import latent_dims
from .config.layers import layer_configs, possible_precisions
from .config.until_full import joined_names
from .ops.rounding import LARGEST_BITS
from .pages import PageLayout
from .store import Store
from .store.faults import GROWTH_PART
from .store.lowering_state import precisions_of
from .store.state import PAGE_ENTRIES

INT = 4
# float32 thresholds and int32 counts of two levels, for each layer, request and head
ROW_BYTES = 4 * INT
FP8_BYTES = 1
# 64-bit counts per request and layer, and other bytes of a store
REQUEST_BYTES, STORE_BYTES = 24, 6
MOST_PLANNED = 1 << 30


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's cache.

    Attributes:
        num_key_value_heads: number of KV heads; 0 if the layer caches no keys and values.
        key_dim, value_dim: elements of a key and of a value.
        window: maximum number of tokens the layer keeps; None keeps all.
        fixed_bytes: bytes of a state whose size does not depend on the number of tokens.
    """

    num_key_value_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    compressed: bool
    fixed_bytes: int = 0

    def dense_bytes(self, tokens: int, element_bytes: int) -> int:
        """Returns the uncompressed bytes of one request with `tokens` tokens."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return self.num_key_value_heads * kept * (self.key_dim + self.value_dim) * element_bytes + self.fixed_bytes


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model, known without its weights.

    Attributes:
        dtype: dtype of keys and values.
        weight_bytes: bytes of the weights; None if unknown.
        limit: maximum number of tokens; None if the configuration does not say.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    weight_bytes: int | None
    limit: int | None

    @classmethod
    def of(cls, model_config: Any, name: str, dtype: torch.dtype | None = None) -> ModelShape:
        """Reads a model's configuration.

        Args:
            name: folder or Hub id of the model, used to look up the size of the weights.
            dtype: dtype of the model; None uses the one it was saved in.

        Raises:
            UnsupportedModelError: `DiffKVCache` does not support the model.
        """
        check_model_config(model_config)
        text_config = model_config.get_text_config(decoder=True)
        saved = getattr(text_config, "dtype", None) or getattr(model_config, "dtype", None) or torch.float32
        dtype = saved if dtype is None else dtype
        model = without_weights(model_config, dtype)
        layers = _shapes_by_running(model, text_config) or _shapes_by_name(text_config)
        # the size of the files is valid only for the saved dtype
        stored = stored_weight_bytes(name) if dtype == saved else None
        counted = None if model is None else sum(p.numel() * p.element_size() for p in model.parameters())
        limit = getattr(text_config, "max_position_embeddings", None)
        return cls(tuple(layers), dtype, stored or counted, limit)

    @property
    def compressed(self) -> list[LayerShape]:
        """Layers that DiffKV compresses."""
        return [layer for layer in self.layers if layer.compressed]

    def other_bytes(self, tokens: int) -> int:
        """Returns the bytes of one request in the layers that DiffKV does not compress."""
        return sum(layer.dense_bytes(tokens, self.dtype.itemsize) for layer in self.layers if not layer.compressed)

    def dense_bytes(self, tokens: int, element_bytes: int | None = None) -> int:
        """Returns the bytes of an uncompressed cache of one request; None uses the size of the model's dtype."""
        size = self.dtype.itemsize if element_bytes is None else element_bytes
        return sum(layer.dense_bytes(tokens, size) for layer in self.layers)

    def diffkv_bytes(self, tokens: int, config: DiffKVConfig, high_share: float) -> int:
        """Returns the bytes of a `DiffKVCache` of one request.

        Args:
            high_share: share of the tokens outside the window that are at the high level; the others are at the low
                level. Ignored without token selection, where each head stores all tokens at one level.

        Raises:
            ValueError: a precision does not fit the heads, or `head_precisions` does not match the number of layers or
                heads.
        """
        compressed, total = self.compressed, self.other_bytes(tokens)
        for layer, held in zip(compressed, layer_configs(config, len(compressed))):
            for precisions in possible_precisions(held, layer.num_key_value_heads):
                share = high_share if held.selects else float(precisions[0] == held.high)
                total += _head_bytes(layer, tokens, held, share, self.dtype.itemsize, self.limit)
        return total


@dataclass(frozen=True)
class BudgetPlan:
    """Number of tokens per request at which `max_bytes` is full, if all requests store theirs in one forward.

    Step-by-step generation differs by up to a page of tokens per row, as room is made some tokens ahead, rows share the
    remaining pages, and scratch memory counts.

    Attributes:
        max_bytes: budget of the compressed layers.
        precise, final: names of the precisions until it is full and once all heads are lowered, from most to fewest
            bits.
        lowering_begins: number of tokens at which heads start to be lowered.
        room_ends: maximum number of tokens that fit with all heads lowered.
    """

    max_bytes: int
    precise: str
    final: str
    lowering_begins: int
    room_ends: int


def plan_budget(shape: ModelShape, config: DiffKVConfig, batch: int, moments: bool) -> BudgetPlan | None:
    """Plans how a budget of `config.max_bytes`, given in bytes, fills up.

    Args:
        moments: whether the model's query moments are known; otherwise a cache keeps its own.

    Returns:
        The plan; None if tokens are not precise until the budget is full.
    """
    compressed = shape.compressed
    if config.precise is None or not compressed:
        return None
    most, held = shape.limit or MOST_PLANNED, layer_configs(config, len(compressed))

    def most_fitting(lowered: bool) -> int:
        return longest(lambda tokens: _fits_budget(shape, held, batch, moments, tokens, lowered), most)

    begins, ends = most_fitting(False) + 1, most_fitting(True)
    rungs = [precisions_of(config, layer.key_dim, layer.value_dim) for layer, config in zip(compressed, held)]
    precise, final = joined_names(each[0] for each in rungs), joined_names(each[-1] for each in rungs)
    return BudgetPlan(int(config.max_bytes or 0), precise, final, begins, ends)


def _fits_budget(
    shape: ModelShape, configs: Sequence[DiffKVConfig], batch: int, moments: bool, tokens: int, lowered: bool
) -> bool:
    """Returns whether a first prompt of `tokens` tokens fits with all rows precise, or with all lowered that can be."""
    compressed, size = shape.compressed, shape.dtype.itemsize
    stores = Counter((layer, config.high, config.low) for layer, config in zip(compressed, configs))
    lowerable: Counter = Counter()
    for layer, config in zip(compressed, configs):
        finals = possible_precisions(config, layer.num_key_value_heads)
        lowerable[layer, config.high, config.low] += finals.count((config.low,))
    first = configs[0]
    stored, slots = max(0, tokens - first.window - first.sinks), first.sinks + first.window + 1
    budget = int(first.max_bytes or 0)
    # a store reserves room to grow until it counts again (`Store.update_limit`)
    left = budget - budget // GROWTH_PART
    for (one, high, low), count in stores.items():
        own = next(c for layer, c in zip(compressed, configs) if (layer, c.high, c.low) == (one, high, low))
        dims = (one.key_dim, one.value_dim, size)
        layouts = PageLayout.of_pairs(own, precisions_of(own, one.key_dim, one.value_dim), *dims, shape.limit)
        layout = layouts[-1]
        capacities = (layouts[0].high.capacity, layout.high.capacity, layout.low.capacity)
        rows = count * batch * one.num_key_value_heads
        width = -(-(stored + slots) // min(capacities)) + 2
        wide = max(size, INT)
        window = slots * ((one.key_dim + one.value_dim) * size + INT) + (wide * one.key_dim if first.center else 0)
        left -= rows * (window + INT * width + ROW_BYTES) + batch * (REQUEST_BYTES * count + Store.refresh_steps + 1)
        left -= 2 * INT * (count + one.num_key_value_heads) + STORE_BYTES
        if first.adaptive_rounding and layout.low.k_bits <= LARGEST_BITS and not moments:
            left -= count * one.num_key_value_heads * one.key_dim**2 * wide
        low_rows = batch * lowerable[one, high, low] if lowered else 0
        capacity = capacities[1] if lowered else capacities[0]
        pages = (rows - low_rows) * -(-stored // capacity) + low_rows * -(-stored // capacities[2])
        # the null page, and entries of the free list
        left -= (pages + 1) * (layout.page_bytes + PAGE_ENTRIES)
    return left >= 0


def longest(fits: Callable[[int], bool], most: int = MOST_PLANNED) -> int:
    """Returns the largest number up to `most` for which `fits` holds, 0 if there is none. `fits` must be monotonic."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def without_weights(model_config: Any, dtype: torch.dtype | None = None) -> Any:
    """Builds the model on the `meta` device, by default in the dtype it was saved in; None if it cannot be built."""
    try:
        with torch.device("meta"):
            # copied, because `from_config` writes the dtype into the configuration
            return AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype).eval()
    except Exception:
        # remote code, or layers that compute during construction
        return None


def stored_weight_bytes(name: str) -> int | None:
    """Returns the total bytes of the safetensors files in a folder or Hub repository; None if unknown."""
    folder = Path(name)
    if folder.is_dir():
        return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except Exception:
        # offline, or no such repository: the caller counts the parameters instead
        return None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None


def _head_bytes(
    layer: LayerShape, tokens: int, config: DiffKVConfig, high_share: float, element_bytes: int, limit: int | None
) -> int:
    layout = PageLayout.of(config, layer.key_dim, layer.value_dim, element_bytes, limit)
    stored = max(0, tokens - config.window - config.sinks)
    high = min(stored, -int(-stored * high_share // 1))
    # one extra page is kept ready for the next tokens
    pages = -(-high // layout.high.capacity) + -(-(stored - high) // layout.low.capacity) + 1
    width = -(-stored // min(layout.high.capacity, layout.low.capacity)) + 2
    slots = config.sinks + config.window + 1
    window = slots * ((layer.key_dim + layer.value_dim) * element_bytes + INT)
    center = INT * layer.key_dim if config.center else 0
    return pages * (layout.page_bytes + INT) + INT * width + window + center + ROW_BYTES


@torch.no_grad()
def _shapes_by_running(model: Any, text_config: Any) -> list[LayerShape] | None:
    """Finds the layers' shapes by running one token on the `meta` device; None if the model cannot run there."""
    if model is None:
        return None
    cache = DynamicCache(config=text_config)
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device="meta"), **passing(cache), use_cache=True)
    except Exception:
        return None
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        fixed = sum(t.numel() * t.element_size() for t in tensors if t is not keys and t is not values)
        if keys is None or values is None or not keys.numel():
            shapes.append(LayerShape(0, 0, 0, None, False, fixed))
            continue
        window = getattr(layer, "sliding_window", None)
        compressed = type(layer) is DynamicLayer
        dims = (keys.shape[3], values.shape[3])
        # latents take the place of other models' keys and are stored as values
        dims = dims[::-1] if compressed and latent_dims(text_config) is not None else dims
        shapes.append(LayerShape(keys.shape[1], *dims, window, compressed, fixed))
    return shapes


def _shapes_by_name(text_config: Any) -> list[LayerShape]:
    """Derives the layers' shapes from common configuration entries; states of linear layers are not counted."""
    attention_heads = text_config.num_attention_heads
    heads = getattr(text_config, "num_key_value_heads", None) or attention_heads
    dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // attention_heads
    shapes = []
    for layer in cache_layers(text_config):
        caches = isinstance(layer, DynamicLayer)
        window = getattr(layer, "sliding_window", None)
        compressed, latent = type(layer) is DynamicLayer, latent_dims(text_config)
        if compressed and latent is not None:
            shapes.append(LayerShape(1, *latent, window, compressed))
            continue
        shapes.append(LayerShape(heads if caches else 0, dim, dim, window, compressed))
    return shapes
