"""The attention and mask functions registered as `"diffkv"`.

Keys and values that carry a `DiffKVLayer` go to it; all others (training, other caches, sliding-window layers) take
ordinary dense attention, so a model may stay on `"diffkv"`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from .compiled import attend
from .dense import dense_attention
from .errors import HandOverError
from .layer import TAG, DiffKVLayer

PADDING = "_diffkv_padding"
# arguments models pass along that do not change attention
HARMLESS = {
    "cache",
    "cache_kwargs",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "labels",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "seq_idx",
    "use_cache",
}


def diffkv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface.

    Args:
        query: [batch, query_heads, tokens, head_dim]; key and value likewise with KV heads.
        attention_mask: None (causal, no padding), bool or additive [batch, 1, tokens, keys], or bool [batch, keys].

    Returns:
        Output [batch, tokens, query_heads, value_dim], and no attention weights.

    Raises:
        HandOverError: keys and values carry different layers, or an argument this function cannot honour.
    """
    # pipeline parallelism wraps further arguments once more
    kwargs |= kwargs.pop("kwargs", None) or {}
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise HandOverError(
            f"{type(module).__name__} passes {unknown} to its attention function, which 'diffkv' cannot honour; use "
            'another cache with attn_implementation="eager" or "sdpa".'
        )
    layer, value_layer = getattr(key, TAG, None), getattr(value, TAG, None)
    if layer is not value_layer:
        raise HandOverError(
            f"{type(module).__name__} changed keys or values after caching them; it cannot use DiffKVCache."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        output = dense_attention(query, key, value, attention_mask, scaling, dropout, softcap, s_aux, causal)
    else:
        if is_causal is False:
            raise HandOverError(f"{type(module).__name__} attends in both directions; it cannot use DiffKVCache.")
        if torch.compiler.is_compiling():
            return _compiled(layer, query, key, value, attention_mask, scaling, softcap, s_aux), None
        if layer.stores.capturing:
            valid = attention_mask[:, 0, -1, -1:].bool() if layer.stores.capturing_mask else None
            output = layer.attend_captured(query, key, value, valid, scaling, softcap, s_aux)
            return output.transpose(1, 2).contiguous(), None
        if layer.pending is None:
            raise HandOverError(
                f"{type(module).__name__} reads keys and values of a layer that were stored already; models that "
                "share them between layers cannot use DiffKVCache here."
            )
        shown, valid, mask = _split_mask(attention_mask, layer, key.shape[2])
        output = layer.attend(query, valid, mask, scaling, softcap, s_aux, shown)
    return output.transpose(1, 2).contiguous(), None


def _compiled(
    layer: DiffKVLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same inside a compiled graph, for one new token per request (a prompt runs uncompiled)."""
    tokens = key.shape[2]
    if tokens != 1:
        raise HandOverError(
            "only decode steps of one token can be compiled with DiffKVCache; run the prompt uncompiled."
        )
    visible = None
    if mask is not None:
        visible = (mask if mask.ndim == 2 else mask[:, 0, -1]).bool()
    output = attend(query, key, value, visible, sinks, layer.stores.order, layer.handle, scaling, softcap)
    return output.transpose(1, 2).contiguous()


def diffkv_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask interface: None means causal, aligned at the last key, without padding.

    Otherwise a bool mask [batch, 1, queries, keys]; where it is causal with padding it carries the padding.
    """
    plain = (
        kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        and _is_int(kwargs.get("q_offset", 0))
        and kwargs.get("kv_offset", 0) == 0
        and kwargs.get("q_offset", 0) + kwargs["q_length"] == kwargs["kv_length"]
    )
    padding = kwargs.get("attention_mask")
    if plain and _no_padding(padding, kwargs["q_length"]):
        return None
    kwargs["allow_is_causal_skip"] = False
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    if plain and padding is not None and padding.shape[-1] == kwargs["kv_length"]:
        setattr(mask, PADDING, padding.bool())
    return mask


def _is_int(offset: Any) -> bool:
    return isinstance(offset, int)


def _no_padding(padding: Tensor | None, queries: int) -> bool:
    if padding is None:
        return True
    # a look at the device, worth it only where it saves a mask of queries x keys
    return queries > 1 and not torch.compiler.is_compiling() and bool(padding.all())


def _split_mask(
    mask: Tensor | None, layer: DiffKVLayer, tokens: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a mask says, each part None where it says nothing.

    Returns:
        Visibility of the tokens seen before, bool [batch, past]; of the new ones, bool [batch, tokens]; and the mask
        among the new ones where it is not plainly causal, bool [batch, 1, tokens, tokens].
    """
    if mask is None:
        return None, None, None
    if mask.shape[-1] != layer.seen:
        raise HandOverError(
            f"the attention mask covers {mask.shape[-1]} keys but the cache has seen {layer.seen}; pass a mask for "
            "all tokens, past ones included."
        )
    past = layer.seen - tokens
    padding = getattr(mask, PADDING, None)
    if padding is None and mask.ndim == 2:
        padding = mask.bool()
    if padding is not None:
        return padding[:, :past], padding[:, past:], None
    mask = _as_bool(mask)
    if mask.shape[1] != 1:
        raise HandOverError("'diffkv' attention cannot use a mask that differs between heads.")
    mask = mask.expand(layer.store.batch_size, -1, -1, -1)
    last = mask[:, 0, -1]
    if tokens > 1 and not bool((mask[..., :past] == last[:, None, None, :past]).all()):
        raise HandOverError(
            "this attention mask hides some past tokens from some of the new ones only; once compressed, a past token "
            "can only be attended by all that follow or, from some forward on, by none."
        )
    return last[:, :past], last[:, past:], mask[..., past:]


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min / 2
    if not bool(((mask == 0) | (mask < lowest)).all()):
        raise HandOverError("'diffkv' attention cannot add a bias to the logits; the mask may only allow or forbid.")
    return mask == 0
