"""Records a prompt's keys, values and queries in a model, and shows them to later forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from ..cache.attention import diffkv_attention, diffkv_mask
from ..cache.supported_models import cache_layers
from ..cache.switching import set_attention
from ..compat import attention_of, forget_attention, passing
from ..config.latent import has_latents

WATCHED_NAME = "diffkv-watched"
WATCHED_TAG = "_diffkv_watched"


class WatchedLayer(DynamicLayer):
    """Cache layer that records a prompt's keys, values and queries, and later only shows keys and values to forwards.

    Attributes:
        queries: queries of the prompt, [1, query_heads, tokens, key_dim] for each layer that reads these keys.
        readers: attention modules that these queries came from.
        options: softcap and attention sinks given with the queries.
        shown: keys and values, [rows or 1, heads, tokens, dim], that a forward attends to in addition to its own; None
            while recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []
        self.readers: list[nn.Module] = []
        self.options: dict[str, Any] = {}
        self.shown: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.shown is None:
            key, value = super().update(key_states, value_states)
            key, value = key.view_as(key), value.view_as(value)
            setattr(key, WATCHED_TAG, self)
            return key, value
        rows = key_states.shape[0]
        both = zip(self.shown, (key_states, value_states))
        key, value = (torch.cat([past.expand(rows, -1, -1, -1), new], dim=2) for past, new in both)
        return key, value

    def note(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
        self.queries.append(query)
        self.readers.append(module)
        self.options = {name: options.get(name) for name in ("softcap", "s_aux")}


class WatchedLatents(WatchedLayer):
    """Layer of latents (docs/latent.md): rotary keys are its keys, latents its values, both of one head.

    The model expands both before it attends, so the attention that follows an update belongs to it.
    """

    expected: WatchedLatents | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes latents as `key_states` and rotary keys as `value_states`."""
        WatchedLatents.expected = self if self.shown is None else None
        rope, latent = super().update(value_states, key_states)
        return latent, rope

    def note(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
        # rotary elements come last
        super().note(module, query[..., -self.keys.shape[3] :], options)


def watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes ordinary attention, and passes the queries to recording layers."""
    layer, WatchedLatents.expected = getattr(key, WATCHED_TAG, WatchedLatents.expected), None
    if layer is not None:
        layer.note(module, query, kwargs | (kwargs.get("kwargs") or {}))
    elif query.shape[2] < key.shape[2] and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return _of_few_queries(query, key, value, attention_mask, scaling), None
    return diffkv_attention(module, query, key, value, attention_mask, scaling, **kwargs)


def _of_few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Computes attention, [rows, tokens, query_heads, value_dim], without repeating keys and values per query head.

    Query heads that share a KV head are treated as further queries of one head.
    """
    rows, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    if mask is None:
        mask = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - tokens)
    mask = mask.expand(*mask.shape[:-2], tokens, -1).repeat(*[1] * (mask.ndim - 2), group, 1)
    folded = query.reshape(rows, key.shape[1], group * tokens, -1)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.view(rows, heads, tokens, -1).transpose(1, 2).contiguous()


@contextmanager
def watching(model: Any) -> Iterator[None]:
    """Makes the model use `watched_attention` within the block."""
    before = attention_of(model.config.get_text_config(decoder=True))
    # left by a forward that was interrupted
    WatchedLatents.expected = None
    AttentionInterface.register(WATCHED_NAME, watched_attention)
    AttentionMaskInterface.register(WATCHED_NAME, diffkv_mask)
    try:
        set_attention(model, WATCHED_NAME)
        yield
    finally:
        set_attention(model, before or "sdpa")
        forget_attention(WATCHED_NAME)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Makes a half-precision model compute in float32 within the block, with the same weights.

    The model then takes twice its memory. Quantised models are not changed, so their losses have more noise.
    """
    tensors = [*model.parameters(), *model.buffers()]
    halves = [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        halves = []
    dtypes = [tensor.dtype for tensor in halves]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, dtype in zip(halves, dtypes):
            tensor.data = tensor.data.to(dtype)


def run_prompt(model: Any, prompt: Sequence[int]) -> tuple[list[Any], list[WatchedLayer]]:
    """Runs a prompt in a model within `watching`. Returns all layers of its cache, and the recording ones."""
    text_config = model.config.get_text_config(decoder=True)
    recording = WatchedLatents if has_latents(text_config) else WatchedLayer
    layers = [recording() if type(layer) is DynamicLayer else layer for layer in cache_layers(text_config)]
    run_tokens(model, torch.tensor([list(prompt)], device=model.device), 0, Cache(layers=layers), 1)
    return layers, [layer for layer in layers if isinstance(layer, WatchedLayer)]


def run_tokens(model: Any, ids: Tensor, start: int, cache: Cache, keep: int | Tensor) -> Tensor:
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)
    return model(
        input_ids=ids, position_ids=positions[None], **passing(cache), use_cache=True, logits_to_keep=keep
    ).logits.float()


def decoder_blocks(model: nn.Module, layers: Sequence[WatchedLayer]) -> list[nn.Module]:
    """Finds the decoder's blocks: the list of modules that each contain the attention of at most one layer.

    Returns:
        The blocks in order; empty if the model has no such list.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) >= len(layers):
            owners = [[i for i, block in enumerate(module) if contains(block, layer.readers[0])] for layer in layers]
            if all(len(found) == 1 for found in owners) and sorted(owners) == owners:
                return list(module)
    return []


def contains(block: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in block.modules())
