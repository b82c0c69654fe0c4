"""Checks whether a `DiffKVCache` can work with a model, as far as its configuration shows."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..compat import can_switch
from .errors import UnsupportedModelError

# models whose kind of attention cannot be told from their configuration
REFUSED_TYPES = {
    "diffllama": "splits values after caching them",
    "doge": "adds a learned bias to its attention logits",
    "dory": "runs layers several times and adds its own layers to the cache",
    "git": "computes text attention itself",
    "inkling_text": "adds a learned position bias to its attention logits",
    "inkling2_text": "adds a learned position bias to its attention logits",
    "inkling2_loop_text": "adds a learned position bias to its attention logits",
    "jetmoe": "repeats keys and values after caching them",
    "mllama_text_model": "keeps keys and values of images in layers that texts skip",
    "minimax": "brings its own cache class",
}
# Transformers' own layers that hold all tokens, or all of a window
KNOWN_KINDS = (
    *(DynamicLayer, DynamicSlidingWindowLayer),
    *(LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer),
)


def check_model_config(model_config: Any) -> None:
    """Raises `UnsupportedModelError` for a model that cannot work with this cache, `ValueError` for other objects."""
    if not hasattr(model_config, "get_text_config"):
        raise ValueError(
            f"model_config is a {type(model_config).__name__}; pass the model or its configuration: "
            "DiffKVCache(model) or DiffKVCache(model.config)."
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            "DiffKVCache works with decoder-only models; for an encoder-decoder model use Transformers' own caches."
        )
    text_config = model_config.get_text_config(decoder=True)
    name = text_config.model_type
    if name in REFUSED_TYPES:
        raise UnsupportedModelError(f"{name} {REFUSED_TYPES[name]}, so DiffKVCache cannot be used; use DynamicCache.")
    if _is_encoder(text_config):
        raise UnsupportedModelError(f"{name} is an encoder here and keeps no cache, so there is nothing to compress.")


def _is_encoder(text_config: Any) -> bool:
    """Returns whether the model reads text in both directions; BERT and others do so unless set up as decoders."""
    kind = type(text_config)
    if kind not in MODEL_FOR_MASKED_LM_MAPPING:
        return False
    return kind not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(text_config, "is_decoder", None) is False


def check_attention(model: Any) -> None:
    """Raises `UnsupportedModelError` for a model whose attention cannot be switched."""
    if not can_switch(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use Transformers' attention interface, so its attention cannot be "
            "switched to 'diffkv'; use another cache."
        )


def cache_layers(text_config: Any) -> list[Any]:
    """Returns the layers that a `DynamicCache` would have.

    Raises:
        UnsupportedModelError: some layers attend to a selection of tokens, or the model has no attention layers.
    """
    layers = list(DynamicCache(config=text_config).layers)
    kinds = {type(layer) for layer in layers if isinstance(layer, DynamicLayer)}
    foreign = {kind.__name__ for kind in kinds.difference(KNOWN_KINDS)}
    if foreign:
        raise UnsupportedModelError(
            f"{text_config.model_type} keeps {', '.join(sorted(foreign))} in its cache: its layers choose the tokens "
            "they attend to, which DiffKVCache does not support; use DynamicCache."
        )
    if layers and all(type(layer) is LinearAttentionLayer for layer in layers):
        raise UnsupportedModelError(
            f"{text_config.model_type} has no attention layers, so there are no keys and values to compress."
        )
    return layers


def shared_layers(text_config: Any) -> dict[int, tuple[int, ...]]:
    """Returns the readers, layers that reuse keys and values, by index of the layer they read."""
    sharing = getattr(text_config, "num_kv_shared_layers", None) or 0
    modes = getattr(text_config, "kv_sharing_modes", None)
    if modes is None and not sharing:
        return {}
    kinds = list(text_config.layer_types)
    reads = [mode == "reuse" for mode in modes] if modes else [i >= len(kinds) - sharing for i in range(len(kinds))]
    # a reader uses the keys and values of the last layer of its kind before all readers
    stored = {kind: index for index, kind in enumerate(kinds) if not reads[index]}
    readers: dict[int, tuple[int, ...]] = {}
    for index, kind in enumerate(kinds):
        if reads[index]:
            readers[stored[kind]] = (*readers.get(stored[kind], ()), index)
    return readers
