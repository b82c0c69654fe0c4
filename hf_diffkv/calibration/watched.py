"""Records a prompt's keys, values and queries in a model, and how later tokens attend to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from ..cache.attention import diffkv_attention, diffkv_mask
from ..cache.latent import EXPAND_METHOD
from ..cache.supported_models import cache_layers
from ..cache.switching import set_attention
from ..compat import attention_of, forget_attention, passing
from ..config.latent import has_latents

WATCHED_NAME = "diffkv-watched"
WATCHED_TAG = "_diffkv_watched"


@dataclass(frozen=True)
class Reading:
    """One call of the attention function for the tokens that follow a prompt, which are the same in every row.

    Attributes:
        module: attention module of the layer that reads the keys and values.
        query, mask: queries and attention mask of the first row.
        output: attention output of the first row, [1, tokens, query_heads, value_dim].
        change: zeros that were added to the output of all rows, for gradients.
    """

    module: nn.Module
    query: Tensor
    mask: Tensor | None
    scaling: float | None
    options: dict[str, Any]
    output: Tensor
    change: Tensor


class WatchedLayer(DynamicLayer):
    """Cache layer that records a prompt's keys, values and queries, and then how later tokens read them.

    Attributes:
        queries: queries of the prompt, [1, query_heads, tokens, key_dim] for each layer that reads these keys.
        options: softcap and attention sinks given with the queries.
        readings: attention of the tokens that follow, for each layer that reads these keys; None during the prompt.
        whole: keys and values of the prompt and the tokens that follow, [1, heads, tokens, dim].
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Tensor] = []
        self.options: dict[str, Any] = {}
        self.readings: list[Reading] | None = None
        self.whole: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.readings is None:
            key, value = super().update(key_states, value_states)
            key, value = key.view_as(key), value.view_as(value)
        else:
            pairs = ((self.keys, key_states), (self.values, value_states))
            key, value = (torch.cat([past.expand(len(new), -1, -1, -1), new], dim=2) for past, new in pairs)
            self.whole = _first_row(key), _first_row(value)
        setattr(key, WATCHED_TAG, self)
        return key, value

    def attend(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """Computes attention over the layer, and notes the prompt's queries or how later tokens read it."""
        output = _attention(module, *arguments, **options)
        if self.readings is None:
            self.queries.append(self._query(arguments[0]))
            given = options | (options.get("kwargs") or {})
            self.options = {name: given.get(name) for name in ("softcap", "s_aux")}
            return output
        change = torch.zeros_like(output, requires_grad=True)
        query, _, _, mask, scaling = arguments
        rows = _first_row(query), None if mask is None else _first_row(mask)
        self.readings.append(Reading(module, *rows, scaling, options, _first_row(output), change))
        return output + change

    def changed(self, reading: Reading, keys: Tensor, values: Tensor) -> Tensor:
        """Returns how other prompt keys and values, [heads, tokens, dim], change a reading's output."""
        with torch.no_grad():
            shown = self._shown(reading.module, *map(_begun_with, self.whole, (keys, values)))
            inputs = reading.query, *shown, reading.mask, reading.scaling
            return _attention(reading.module, *inputs, **reading.options) - reading.output

    def _query(self, query: Tensor) -> Tensor:
        """Returns the elements of a query that meet the layer's keys."""
        return query

    def _shown(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values as the attention function receives them."""
        return keys, values


class WatchedLatents(WatchedLayer):
    """Layer of latents (docs/latent.md): rotary keys are its keys and latents its values, both with one head.

    The model expands both before attention, so the attention call after an update belongs to it.
    """

    expected: WatchedLatents | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes latents as `key_states` and rotary keys as `value_states`."""
        WatchedLatents.expected = self
        rope, latent = super().update(value_states, key_states)
        return latent, rope

    def _query(self, query: Tensor) -> Tensor:
        # rotary elements come last
        return query[..., -self.keys.shape[3] :]

    def _shown(self, module: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(module, EXPAND_METHOD)(values, keys)


def watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes ordinary attention, through the layer that these keys belong to if it is watched."""
    layer, WatchedLatents.expected = getattr(key, WATCHED_TAG, WatchedLatents.expected), None
    arguments = query, key, value, attention_mask, scaling
    return _attention(module, *arguments, **kwargs) if layer is None else layer.attend(module, arguments, kwargs), None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    **options: Any,
) -> Tensor:
    """Returns the attention output, [1, tokens, query_heads, value_dim]."""
    plain = options.get("softcap") is None and options.get("s_aux") is None
    if plain and query.shape[2] < key.shape[2]:
        return _of_few_queries(query, key, value, mask, scaling)
    return diffkv_attention(module, query, key, value, mask, scaling, **options)[0]


def _first_row(tensor: Tensor) -> Tensor:
    """Returns a copy of the first row, detached from the graph and the other rows' memory."""
    return tensor[:1].detach().clone()


def _begun_with(tensor: Tensor, beginning: Tensor) -> Tensor:
    """Returns a copy of `tensor`, [1, heads, tokens, dim], that starts with `beginning`, [heads, tokens, dim]."""
    return torch.cat([beginning[None].to(tensor.dtype), tensor[:, :, beginning.shape[1] :]], dim=2)


def _of_few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Computes attention, [rows, tokens, query_heads, value_dim], without repeating keys and values per query head.

    Query heads that share a KV head are treated as additional queries of one head.
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
    # left by an interrupted forward
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

    The model then uses twice its memory. Quantised models are not converted, so their losses are noisier.
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
    """Runs a prompt in a model within `watching`. Returns all layers of its cache, and those that record."""
    text_config = model.config.get_text_config(decoder=True)
    recording = WatchedLatents if has_latents(text_config) else WatchedLayer
    layers = [recording() if type(layer) is DynamicLayer else layer for layer in cache_layers(text_config)]
    run_tokens(model, torch.tensor([list(prompt)], device=model.device), 0, Cache(layers=layers), 1)
    return layers, [layer for layer in layers if isinstance(layer, WatchedLayer)]


def run_tokens(model: Any, ids: Tensor, start: int, cache: Cache, keep: int | Tensor) -> Tensor:
    """Returns float32 logits, [1, kept, vocabulary], of tokens that start at position `start`."""
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)
    return model(
        input_ids=ids, position_ids=positions[None], **passing(cache), use_cache=True, logits_to_keep=keep
    ).logits.float()
