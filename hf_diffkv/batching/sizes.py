"""How a byte budget becomes slots and pages, for a model whose attention is tried out first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache.dense import dense_attention
from ..cache.devices import TensorParallel
from ..cache.errors import UnsupportedModelError
from ..cache.supported_models import cache_layers, check_model_config, shared_layers
from ..config import DiffKVConfig
from ..ops.softmax import Softmax
from ..pages import PageLayout
from .shapes import AttentionShape, SlidingShape
from .slot_part import layer_configs
from .slot_room import PerSlot
from .slots import Slots


class _Trial:
    """In place of a cache: ordinary attention, and what comes in."""

    def __init__(self, max_positions: int | None) -> None:
        self.max_positions = max_positions
        self.shapes: dict[int, AttentionShape] = {}
        self.windows: dict[int, int] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, sliding_window: int | None
    ) -> Tensor:
        if sliding_window is not None:
            self.windows[layer] = sliding_window
        dims = (key.shape[1], query.shape[1], key.shape[3], value.shape[3])
        self.shapes[layer] = AttentionShape(*dims, key.dtype, key.device, self.max_positions)
        return dense_attention(query, key, value, None, softmax, 0.0, causal=True)


def check_servable_config(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError` for a model, called `name`, whose configuration rules continuous batching out."""
    check_model_config(config)
    text_config = config.get_text_config(decoder=True)
    layers = cache_layers(text_config)
    kinds = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    # chunks of attention are kept in the same kind of layer
    if getattr(text_config, "attention_chunk_size", None) is not None:
        kinds |= {"chunked_attention"} & set(getattr(text_config, "layer_types", None) or ("chunked_attention",))
    if kinds:
        raise _unservable(name, f"has layers beside full and sliding attention ({', '.join(sorted(kinds))})")
    if shared_layers(text_config):
        raise _unservable(name, "has layers that read the keys and values of earlier ones")
    windows = {layer.sliding_window for layer in layers if type(layer) is DynamicSlidingWindowLayer}
    if windows and not any(type(layer) is DynamicLayer for layer in layers):
        raise _unservable(name, "has sliding-window layers only, of which none is compressed")
    if windows - {getattr(text_config, "sliding_window", None)}:
        raise _unservable(name, f"has sliding windows of several lengths ({', '.join(map(str, sorted(windows)))})")


def sliding_layers(config: Any) -> SlidingShape | None:
    """The sliding-window layers of a model that passed `check_servable_config`; None where it has none."""
    layers = cache_layers(config.get_text_config(decoder=True))
    sliding = [i for i, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    return SlidingShape(tuple(sliding), layers[sliding[0]].sliding_window) if sliding else None


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
    text_config = model.config.get_text_config(decoder=True)
    trial, count = _Trial(getattr(text_config, "max_position_embeddings", None)), text_config.num_hidden_layers
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False, cache=trial)
    if sorted(trial.shapes) != list(range(count)) or len(set(trial.shapes.values())) != 1:
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} differ in heads, head_dim, dtype or device, or do not all attend "
            "through the attention interface; continuous batching with the compressed cache needs them alike."
        )
    sliding = sliding_layers(model.config)
    expected = {} if sliding is None else dict.fromkeys(sliding.layers, sliding.window)
    # some models say it in their mask alone
    if trial.windows.items() - expected.items():
        raise _unservable(type(model).__name__, "has sliding windows that its configuration does not tell of")
    return trial.shapes[0]


def make_slots(
    config: DiffKVConfig,
    shape: AttentionShape,
    num_layers: int,
    requests: int,
    tokens: int | None,
    max_bytes: int,
    others: Sequence[PerSlot] = (),
) -> Slots:
    """Slots for `requests` requests of `tokens` tokens at most, as many and as long as fit `max_bytes`.

    Args:
        num_layers: of full attention.
        tokens: None is as long as fits.
        others: hold something for every slot as well.

    Raises:
        ValueError: as `layer_configs`.
        MemoryError: not even one slot fits.
    """
    token = 0.0
    sizes = (shape.key_dim, shape.value_dim, shape.dtype.itemsize, shape.max_positions)
    for of_layer in layer_configs(config, num_layers, shape.num_heads):
        layout = PageLayout.of(of_layer, *sizes)
        token += shape.num_heads * layout.page_bytes / max(layout.high.capacity, layout.low.capacity)
    fitting = int(max_bytes / token) + config.window + config.sinks
    longest = max(1, fitting if tokens is None else min(fitting, tokens))
    return Slots(config, shape, num_layers, requests, max_tokens=longest, max_bytes=max_bytes, others=others)


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
