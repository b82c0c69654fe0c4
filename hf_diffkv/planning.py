"""What a cache will take, from a model's configuration alone: no weights are loaded and nothing runs.

Counts are those of the stores: whole pages, window, page table, free list, counters. What a forward needs beside the
cache, activations above all, is not in them.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from .cache.supported_models import cache_layers, check_model_config
from .compat import passing
from .config import DiffKVConfig
from .config.head_groups import head_groups
from .pages import PageLayout

INT = 4
# float32 thresholds and int32 counts of two levels, per layer, request and head
ROW_BYTES = 4 * INT
FP8_BYTES = 1
MOST_PLANNED = 1 << 30


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches.

    Attributes:
        num_key_value_heads, key_dim, value_dim: of its keys and values; 0 heads where it caches none.
        window: tokens it keeps at most; None keeps all.
        compressed: whether DiffKV compresses it.
        fixed_bytes: of a state whose size does not depend on the tokens.
    """

    num_key_value_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    compressed: bool
    fixed_bytes: int = 0

    def dense_bytes(self, tokens: int, element_bytes: int) -> int:
        """Bytes of one request, uncompressed."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return self.num_key_value_heads * kept * (self.key_dim + self.value_dim) * element_bytes + self.fixed_bytes


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model without its weights.

    Attributes:
        dtype: of keys and values.
        weight_bytes: of the weights, None where they cannot be told.
        limit: tokens the model takes, None where its configuration does not say.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    weight_bytes: int | None
    limit: int | None

    @classmethod
    def of(cls, model_config: Any, name: str, dtype: torch.dtype | None = None) -> ModelShape:
        """Reads a configuration.

        Args:
            name: the folder or Hub id it came from, where the size of the weights is looked up.
            dtype: of the model; None takes the one it was saved in.

        Raises:
            UnsupportedModelError: a model `DiffKVCache` cannot work with.
        """
        check_model_config(model_config)
        text_config = model_config.get_text_config(decoder=True)
        saved = getattr(text_config, "dtype", None) or getattr(model_config, "dtype", None) or torch.float32
        dtype = saved if dtype is None else dtype
        model = without_weights(model_config, dtype)
        layers = _shapes_by_running(model, text_config) or _shapes_by_name(text_config)
        # the files are in the dtype they were saved in
        stored = stored_weight_bytes(name) if dtype == saved else None
        counted = None if model is None else sum(p.numel() * p.element_size() for p in model.parameters())
        limit = getattr(text_config, "max_position_embeddings", None)
        return cls(tuple(layers), dtype, stored or counted, limit)

    @property
    def num_compressed(self) -> int:
        """How many layers DiffKV compresses."""
        return sum(layer.compressed for layer in self.layers)

    def dense_bytes(self, tokens: int, element_bytes: int | None = None) -> int:
        """Bytes of an uncompressed cache of one request; `element_bytes` None takes the model's dtype."""
        size = self.dtype.itemsize if element_bytes is None else element_bytes
        return sum(layer.dense_bytes(tokens, size) for layer in self.layers)

    def diffkv_bytes(self, tokens: int, config: DiffKVConfig, high_share: float) -> int:
        """Bytes of a `DiffKVCache` of one request.

        Args:
            high_share: part of the tokens outside the window that are at the high level; the others are at the low one.
                Where no token is chosen, a head has all of them at one.

        Raises:
            ValueError: a precision that does not fit the heads, or precisions for another number of layers or heads.
        """
        size = self.dtype.itemsize
        compressed = [layer for layer in self.layers if layer.compressed]
        total = sum(layer.dense_bytes(tokens, size) for layer in self.layers if not layer.compressed)
        for group in head_groups(config, len(compressed)):
            layer, held = compressed[group.layer], group.config
            for precisions in group.precisions(layer.num_key_value_heads):
                share = high_share if held.selects else float(precisions[0] == held.high)
                total += _head_bytes(layer, tokens, held, share, size, self.limit)
        return total


def longest(fits: Callable[[int], bool], most: int = MOST_PLANNED) -> int:
    """The largest number up to `most` for which `fits` holds, 0 where it never does. It must hold for all below."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def without_weights(model_config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model on the device `meta`, which holds no numbers; None where it cannot be made.

    Args:
        dtype: None takes the one it was saved in.
    """
    try:
        with torch.device("meta"):
            # which notes its dtype in the configuration
            return AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=dtype).eval()
    except Exception:
        # code from the Hub, or layers that compute while they are made
        return None


def stored_weight_bytes(name: str) -> int | None:
    """Bytes of the safetensors files of a folder, or of a repository of the Hub; None where that cannot be told."""
    folder = Path(name)
    if folder.is_dir():
        return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except Exception:
        # offline, or no such repository: the size is then counted from the configuration
        return None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None


def _head_bytes(
    layer: LayerShape, tokens: int, config: DiffKVConfig, high_share: float, element_bytes: int, limit: int | None
) -> int:
    layout = PageLayout.of(config, layer.key_dim, layer.value_dim, element_bytes, limit)
    stored = max(0, tokens - config.window - config.sinks)
    high = min(stored, -int(-stored * high_share // 1))
    # one more page than is full is kept ready for the tokens to come
    pages = -(-high // layout.high.capacity) + -(-(stored - high) // layout.low.capacity) + 1
    width = -(-stored // min(layout.high.capacity, layout.low.capacity)) + 2
    slots = config.sinks + config.window + 1
    window = slots * ((layer.key_dim + layer.value_dim) * element_bytes + INT)
    center = INT * layer.key_dim if config.center else 0
    return pages * (layout.page_bytes + INT) + INT * width + window + center + ROW_BYTES


@torch.no_grad()
def _shapes_by_running(model: Any, text_config: Any) -> list[LayerShape] | None:
    """What the layers cache of one token, seen on the device `meta`; None for models that look at numbers."""
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
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], window, compressed, fixed))
    return shapes


def _shapes_by_name(text_config: Any) -> list[LayerShape]:
    """The same from the names that configurations have in common; states of linear layers are not counted."""
    attention_heads = text_config.num_attention_heads
    heads = getattr(text_config, "num_key_value_heads", None) or attention_heads
    dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // attention_heads
    shapes = []
    for layer in cache_layers(text_config):
        caches = isinstance(layer, DynamicLayer)
        window = getattr(layer, "sliding_window", None)
        shapes.append(LayerShape(heads if caches else 0, dim, dim, window, type(layer) is DynamicLayer))
    return shapes
