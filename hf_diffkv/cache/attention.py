"""The attention and mask functions registered as `"diffkv"`.

Keys and values that carry a `DiffKVLayer` go to that layer. All others (training, other caches, sliding-window layers)
get ordinary dense attention, so a model can be left on `"diffkv"`.

In a compiled forward, a layer's whole attention is one opaque operator, `attend`, so that the forward compiles into one
graph. The operator identifies the layer by a number, passed as a tensor so that one graph serves every cache whose
layers have the same shapes. It declares that it mutates a tensor shared by all layers, which keeps it from being
reordered or dropped. The compiler may pass copies of both tensors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from ..ops.softmax import Softmax
from .dense import dense_attention
from .errors import HandOverError
from .handles import awaiting_layers, layer_of
from .layer import DEFERRED, LAYER_TAG, DiffKVLayer

# attribute of a causal mask with padding: the padding, [batch, keys]
PADDING = "_diffkv_padding"
# arguments that models pass along but that do not affect attention
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
    "tokenizer",
    "use_cache",
}


@torch.library.custom_op("hf_diffkv::refuse_gradient", mutates_args=())
def refuse_gradient(gradient: Tensor, like: Tensor) -> Tensor:
    """Raises `RuntimeError` instead of computing a gradient, [*like.shape]; compilers trace it without running it."""
    raise RuntimeError(
        "attention with a DiffKVCache has no gradient; train without a cache (use_cache=False), or with "
        "Transformers' own."
    )


@refuse_gradient.register_fake
def _(gradient: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


class _NoGradient(torch.autograd.Function):
    """Passes on the output of a cache and refuses the backward pass, as stored tokens have no gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        return None, *(refuse_gradient(gradient, state) for state in (query, key, value))


def diffkv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implements Transformers' attention interface.

    Args:
        query: [batch, query_heads, tokens, head_dim]; key and value likewise with KV heads.
        attention_mask: None (causal, no padding), bool or additive [batch, 1, tokens, keys], or bool [batch, keys].
        kwargs: `dropout`, `softcap`, `s_aux` (logits of attention sinks), `is_causal`; `sliding_window` is in the mask.

    Returns:
        Output [batch, tokens, query_heads, value_dim], and no attention weights.

    Raises:
        HandOverError: keys and values carry different layers, or an argument cannot be honoured.
    """
    # pipeline parallelism wraps further arguments in another `kwargs`
    kwargs |= kwargs.pop("kwargs", None) or {}
    dropout, softcap, sinks = kwargs.pop("dropout", 0.0), kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    is_causal = kwargs.pop("is_causal", None)
    kwargs.pop("sliding_window", None)
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in HARMLESS)
    if unknown:
        raise HandOverError(
            f"{type(module).__name__} passes {unknown} to its attention function, which 'diffkv' cannot honour; use "
            'another cache with attn_implementation="eager" or "sdpa".'
        )
    layer, value_layer = getattr(key, LAYER_TAG, None), getattr(value, LAYER_TAG, None)
    if layer is not value_layer:
        raise HandOverError(
            f"{type(module).__name__} changed keys or values after caching them; it cannot use DiffKVCache."
        )
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
    # whether this layer reads the keys and values of an earlier one
    reads = getattr(module, "is_kv_shared_layer", False)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if layer is None:
        if reads and not torch.compiler.is_compiling():
            _check_not_moved(key)
        output = dense_attention(query, key, value, attention_mask, softmax, dropout, causal)
        return output.transpose(1, 2).contiguous(), None
    # a mask alone defines visibility
    if is_causal is False or not causal and attention_mask is None and query.shape[2] > 1:
        raise HandOverError(f"{type(module).__name__} attends in both directions; it cannot use DiffKVCache.")
    if dropout:
        _warn_of_dropout(type(module).__name__, dropout)
    compiling = torch.compiler.is_compiling()
    if compiling:
        # the operator picks up the tokens when it runs
        layer.stores.pending = None
    elif getattr(key, DEFERRED, False) and not reads:
        # the compiled graph broke between `update` and here
        layer.stores.pending = None
        layer.announce(key, value)
    leave = None
    if layer.has_latents:
        query, leave = layer.enter(module, query, value)
    if compiling:
        place = (layer.stores.order, layer.handle, reads)
        with torch.no_grad():
            output = attend([query, key, value], attention_mask, sinks, *place, softmax.scaling, softcap)
    else:
        output = _attend_now(layer, query, key, value, attention_mask, softmax)
        layer.done()
    if torch.is_grad_enabled():
        output = _NoGradient.apply(output, query, key, value)
    output = output if leave is None else leave(output)
    return output.transpose(1, 2).contiguous(), None


# runs while a compiler traces it, so that compiled graphs stay whole
@torch.compiler.assume_constant_result
def _warn_of_dropout(name: str, dropout: float) -> None:
    warnings.warn(
        f"{name} asks for attention_dropout={dropout}, which attention with a DiffKVCache does not apply; call "
        "model.eval() before generating.",
        stacklevel=3,
    )


def _check_not_moved(key: Tensor) -> None:
    """Raises `HandOverError` if untagged keys of a reading layer are a copy of keys that an awaiting layer stored."""
    for layer in awaiting_layers():
        awaited = layer.awaited
        if awaited.shape == key.shape and layer.store.device != key.device and awaited.thread == threading.get_ident():
            layer.give_up()
            raise HandOverError(
                "layers that share keys and values are on different devices; call cache.attach(model) before the "
                "first forward (generate() does it)."
            )


def diffkv_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Implements Transformers' mask interface. None means causal, aligned at the last key, without padding.

    Otherwise returns a bool mask [batch, 1, queries, keys]. A causal mask with padding carries the padding.

    Raises:
        HandOverError: the padding mask is shorter than the text; Transformers would hide the remaining tokens.
    """
    plain = (
        kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        and isinstance(kwargs.get("q_offset", 0), int)
        and kwargs.get("kv_offset", 0) == 0
        and kwargs.get("q_offset", 0) + kwargs["q_length"] == kwargs["kv_length"]
    )
    padding = kwargs.get("attention_mask")
    if plain and padding is not None and padding.shape[-1] < kwargs["kv_length"]:
        raise _short_mask(padding, kwargs["kv_length"])
    if plain and _no_padding(padding, kwargs["q_length"]) and not _needs_mask(**kwargs):
        return None
    kwargs["allow_is_causal_skip"] = False
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    if plain and padding is not None and padding.shape[-1] == kwargs["kv_length"]:
        setattr(mask, PADDING, padding.bool())
    return mask


def _needs_mask(q_length: int, config: Any = None, q_offset: int = 0, **kwargs: Any) -> bool:
    """Returns whether later tokens need a mask to be causal, because PaliGemma's attention modules say they are not.

    With no earlier tokens, Transformers' "eager" and "sdpa" disagree on what the tokens see.
    """
    return q_length > 1 and q_offset > 0 and getattr(config, "use_bidirectional_attention", None) is True


def _no_padding(padding: Tensor | None, queries: int) -> bool:
    if padding is None:
        return True
    # reads the device, which pays off only if it saves a mask of queries x keys
    return queries > 1 and not torch.compiler.is_compiling() and bool(padding.all())


def _short_mask(mask: Tensor, seen: int) -> HandOverError:
    return HandOverError(
        f"the attention mask covers {mask.shape[-1]} keys but the cache has seen {seen}; pass a mask for all tokens, "
        "past ones included. If an earlier forward stopped halfway, call cache.reset() first."
    )


def split_mask(
    mask: Tensor | None, layer: DiffKVLayer, tokens: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Splits a mask into past tokens, padding and attention among new tokens.

    Returns:
        Visibility of past tokens, bool [batch, past]; visibility of new tokens, bool [batch, tokens]; mask among the
        new tokens, bool [batch, 1, tokens, tokens]. Each may be None if it hides nothing, the last one also if
        attention is plainly causal.

    Raises:
        HandOverError: the mask has the wrong length, differs between heads, adds a bias, or hides tokens in a way that
            a compressed cache cannot follow.
    """
    if mask is None:
        return None, None, None
    if mask.shape[-1] != layer.seen:
        raise _short_mask(mask, layer.seen)
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
            "this attention mask hides some past tokens from only some of the new ones; once compressed, a past token "
            "must be visible to all later tokens or, from some forward on, to none."
        )
    valid, new = last[:, past:], mask[..., past:]
    if tokens > 1 and _shows_padding(new[:, 0], valid):
        raise HandOverError(
            "this attention mask hides new tokens from the last one, which marks them as padding, but shows them to "
            "others; let the last new token see every token that is not padding, and pass texts packed into one row "
            "as separate rows of a batch."
        )
    return last[:, :past], valid, new


def _shows_padding(new: Tensor, valid: Tensor) -> bool:
    """Returns whether a token sees another one that is padding, given a mask among the new tokens.

    Padding itself may see everything; Transformers' masks use this to avoid rows that see nothing.
    """
    itself = torch.eye(new.shape[-1], dtype=torch.bool, device=new.device)
    sees_padding = (new & ~valid[:, None] & ~itself).any(-1)
    return bool((sees_padding & (valid | ~new.all(-1))).any())


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise HandOverError(
            f"'diffkv' attention cannot use a mask of {mask.dtype}; pass mask.bool(), with True for visible keys."
        )
    lowest = torch.finfo(mask.dtype).min / 2
    if not bool(((mask == 0) | (mask < lowest)).all()):
        raise HandOverError("'diffkv' attention cannot add a bias to the logits; the mask may only allow or forbid.")
    return mask == 0


# the operator's work on the host must not be lost in a graph that the compiler captures
@torch.library.custom_op("hf_diffkv::attend", mutates_args=("order",), tags=(torch.Tag.cudagraph_unsafe,))
def attend(
    states: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    order: Tensor,
    handle: Tensor,
    reads: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Runs a layer's `announce` and `attend`, its `read`, or, within a captured step, its `attend_captured`.

    Args:
        states: query, key and value, in the shapes that these methods take.
        mask: mask that the attention function was given.
        order: tensor shared by the layers of a cache, never read.
        handle: int64 [1], from `handles.new_handle`.
        reads: whether this layer reads the keys and values of an earlier layer of the model, whose mask it shares.
        scaling, softcap: scale of the logits, and bound of their soft capping or None.
    """
    return attend_at(layer_of(handle), *states, mask, Softmax(scaling, softcap, sinks), reads)


def attend_at(
    layer: DiffKVLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softmax: Softmax,
    reads: bool,
) -> Tensor:
    """Runs the operator `attend` on a layer; arguments as in `attend`."""
    if not reads and layer.pending is None:  # otherwise `update` ran outside the graph
        layer.announce(key, value)
    output = _attend_now(layer, query, key, value, mask, softmax).contiguous()
    if not layer.stores.has_other_layers:  # otherwise the other layers get their tokens after the graph has run
        layer.done()
    return output


def _attend_now(
    layer: DiffKVLayer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax
) -> Tensor:
    """Attends with announced tokens, as a reader if there are none, or within a captured step."""
    if layer.stores.capturing:
        return layer.attend_captured(query, key, value, mask, softmax)
    if layer.pending is None:
        return layer.read(query, key, mask, softmax)
    shown, valid, among = split_mask(mask, layer, key.shape[2])
    output = layer.attend(query, softmax, valid, among, shown)
    layer.expect(mask)
    return output


@attend.register_fake
def _(states: Sequence[Tensor], *others: Any) -> Tensor:
    query, _, value = states
    return query.new_empty(*query.shape[:3], value.shape[3])
