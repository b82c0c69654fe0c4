"""Checks whether a model can be batched continuously, and sorts its layers by what they keep of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from hf_diffkv.cache.devices import TensorParallel
from hf_diffkv.cache.errors import UnsupportedModelError
from hf_diffkv.cache.supported_models import cache_layers, check_model_config, shared_layers
from hf_diffkv.config.latent import has_latents

from .linear_layers import LinearModule, find_modules
from .shapes import SlidingShape

# layers of a cache by what they keep: full attention, sliding windows, states, nothing
BOTH = "LinearAttentionAndFullAttentionLayer"
KNOWN = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer}


@dataclass(frozen=True)
class ModelLayers:
    """Indices of a model's layers, by what they keep.

    Attributes:
        full: layers of full attention.
        sliding: layers of sliding-window attention, if any.
        linear: layers of linear attention or convolutions, each with the number of its states.
    """

    full: tuple[int, ...]
    sliding: SlidingShape | None
    linear: Mapping[int, int]

    @property
    def attention(self) -> list[int]:
        """Layers that attend to tokens."""
        return sorted((*self.full, *(() if self.sliding is None else self.sliding.layers)))


def model_layers(config: Any) -> ModelLayers:
    """Returns the layers of a model that passed `check_servable_config`."""
    layers = cache_layers(config.get_text_config(decoder=True))
    full = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)
    sliding = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer)
    windows = SlidingShape(sliding, layers[sliding[0]].sliding_window) if sliding else None
    linear = {i: layer.number_of_states for i, layer in enumerate(layers) if type(layer) is LinearAttentionLayer}
    return ModelLayers(full, windows, linear)


def check_servable_config(config: Any, name: str) -> None:
    """Raises `UnsupportedModelError` for a model, called `name`, whose configuration rules out continuous batching."""
    check_model_config(config)
    text_config = config.get_text_config(decoder=True)
    layers = cache_layers(text_config)
    kinds = {type(layer).__name__ for layer in layers} - {kind.__name__ for kind in KNOWN}
    # chunked attention uses the same kind of layer
    if getattr(text_config, "attention_chunk_size", None) is not None:
        kinds |= {"chunked_attention"} & set(getattr(text_config, "layer_types", None) or ("chunked_attention",))
    if BOTH in kinds:
        why = f"Transformers' cache keeps both in one object ({BOTH}), which is not split here"
        raise unservable(name, "has linear and full attention in one layer", why)
    if kinds:
        reason = f"has layers other than full, sliding and linear attention ({', '.join(sorted(kinds))})"
        raise unservable(name, reason)
    if has_latents(text_config):
        raise unservable(name, "caches latents (multi-head latent attention), which the engine's slots do not support")
    if shared_layers(text_config):
        raise unservable(name, "has layers that read the keys and values of earlier ones")
    windows = {layer.sliding_window for layer in layers if type(layer) is DynamicSlidingWindowLayer}
    if windows and not any(type(layer) is DynamicLayer for layer in layers):
        raise unservable(name, "has only sliding-window layers, none of which is compressed")
    if windows - {getattr(text_config, "sliding_window", None)}:
        raise unservable(name, f"has sliding windows of different lengths ({', '.join(map(str, sorted(windows)))})")


def check_servable(model: Any) -> list[LinearModule]:
    """Returns the modules of `model` that keep states.

    Raises:
        UnsupportedModelError: the model cannot be batched continuously, or not on its device.
    """
    name = type(model).__name__
    check_servable_config(model.config, name)
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise unservable(name, "is spread over several devices")
    linear = model_layers(model.config).linear
    if not linear:
        return []
    if TensorParallel.of(model).size > 1:
        why = "ranks tell each other about their pages but not about states"
        raise unservable(name, "has linear attention and is spread by tensor parallelism", why)
    try:
        modules = find_modules(model.get_decoder())
    except ValueError as error:
        raise unservable(name, f"keeps states in {error}, whose forward cannot be run request by request") from None
    if [module.layer for module in modules] != sorted(linear):
        raise unservable(name, "keeps states elsewhere than in one module of each layer that its configuration names")
    return modules


def unservable(name: str, reason: str, why: str | None = None) -> UnsupportedModelError:
    """Returns the error for a model called `name`. `reason` says what is unsupported, and `why` gives the cause."""
    stands = "" if why is None else f": {why}"
    return UnsupportedModelError(
        f"{name} {reason}, which continuous batching with the compressed cache does not support{stands}; leave "
        'cache_implementation="diffkv" out of it, or use generate().'
    )
