"""How a byte budget becomes slots and pages, for a model whose attention is tried out first."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import DiffKVConfig
from ..memory import PageLayout
from ..store import Slots
from .dense import dense_attention
from .devices import TensorParallel
from .errors import UnsupportedModelError
from .models import cache_layers, check_model_config, shared_layers

# share of the budget that slots may take beside the pages
SLOT_SHARE = 0.25


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer: KV heads, query heads, elements of a key and of a value, and where they are."""

    num_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class _Trial:
    """In place of a cache: ordinary attention, and what comes in."""

    def __init__(self) -> None:
        self.shapes: dict[int, AttentionShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        dims = (key.shape[1], query.shape[1], key.shape[3], value.shape[3])
        self.shapes[layer] = AttentionShape(*dims, key.dtype, key.device)
        scaling, softcap, sinks = (options[name] for name in ("scaling", "softcap", "sinks"))
        return dense_attention(query, key, value, None, scaling, 0.0, softcap, sinks, causal=True)


def check_servable_config(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError` for a model, called `name`, whose configuration rules continuous batching out."""
    check_model_config(config)
    text_config = config.get_text_config(decoder=True)
    kinds = sorted({type(layer).__name__ for layer in cache_layers(text_config)} - {"DynamicLayer"})
    if kinds:
        raise _unservable(name, f"has layers beside full attention ({', '.join(kinds)})")
    if shared_layers(text_config):
        raise _unservable(name, "has layers that read the keys and values of earlier ones")


def check_servable(model: Any) -> None:
    """Raises `UnsupportedModelError` for a model that cannot be batched continuously, or not where it is."""
    name = type(model).__name__
    check_servable_config(model.config, name)
    if TensorParallel.of(model).size > 1:
        raise _unservable(name, "is spread by tensor parallelism")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise _unservable(name, "is spread over several devices")


def _unservable(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} {reason}, which continuous batching with the compressed cache does not do; leave "
        'cache_implementation="diffkv" out of it, or use generate().'
    )


def try_attention(model: Any) -> AttentionShape:
    """Runs two tokens through `model`, whose attention is the paged one, and looks at what its layers do.

    Raises:
        HandOverError: the model does not hand its cache on.
        UnsupportedModelError: layers that differ, or that pass the attention by.
    """
    trial, count = _Trial(), model.config.get_text_config(decoder=True).num_hidden_layers
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False, cache=trial)
    if sorted(trial.shapes) != list(range(count)) or len(set(trial.shapes.values())) != 1:
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} differ in heads, head_dim, dtype or device, or do not all attend "
            "through the attention interface; continuous batching with the compressed cache needs them alike."
        )
    return trial.shapes[0]


def make_slots(
    config: DiffKVConfig, shape: AttentionShape, num_layers: int, requests: int, tokens: int | None, max_bytes: int
) -> Slots:
    """Slots for `requests` requests of `tokens` tokens at most, or as many and as long as fit `max_bytes`.

    What slots take beside their pages is kept to a quarter of the budget, but for one of them.

    Args:
        tokens: None is as long as fits.

    Raises:
        MemoryError: not even one slot fits.
    """
    layout = PageLayout.of(replace(config, max_bytes=None), shape.key_dim, shape.value_dim, shape.dtype.itemsize, None)
    per_row = max_bytes // (layout.page_bytes * num_layers * shape.num_heads)
    fitting = per_row * max(layout.high.capacity, layout.low.capacity) + config.window + config.sinks
    longest = fitting if tokens is None else min(fitting, tokens)
    options = {"max_tokens": max(1, longest), "max_bytes": max_bytes}
    one = Slots(config, num_layers, 1, *astuple(shape), **options)
    beside = one.bytes - one.store.pool.bytes
    slots = min(requests, max(1, int(SLOT_SHARE * max_bytes) // beside))
    return one if slots == 1 else Slots(config, num_layers, slots, *astuple(shape), **options)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken on `device`.

    Raises:
        ValueError: nobody knows; the caller should be given a budget.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    raise ValueError(f"how much memory is free on {device} is not known; set max_bytes in cache_config.")
