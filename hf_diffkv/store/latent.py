"""Attention of layers that cache latents (docs/latent.md).

Such a layer has one KV head. Its key is the rotary part of all heads' keys, [batch, 1, tokens, rope_dim], and its value
is the latent, [batch, 1, tokens, rank]. A projection of the latent gives each head its value and the rest of its key.

An absorbed query has both parts: the rotary query, then the rest of the query multiplied by the projection of keys. It
is [batch, query_heads, tokens, rope_dim + rank]. Its logits are its products with key and value together, and its
output, a weighted sum of latents, is multiplied by the projection of values. Nothing is ever computed per token and
head, which makes steps fast. For a prompt it is cheaper to expand the latents into keys and values of all heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..ops.prefill_attention import prefill_attention
from ..ops.prefill_attention.reference import dense_tokens
from ..ops.softmax import Softmax
from ..pages import EarlierTokens
from .forms import Entering, model_form, model_keys, note_logits
from .prompt import Past, compress
from .state import Store

# turns latents and rotary keys, [batch, 1, tokens, dim], into keys and values of all heads, [batch, heads, tokens, dim]
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def attend_expanded(
    store: Store,
    layer: int,
    query: Tensor,
    new: tuple[Tensor, Tensor],
    softmax: Softmax,
    expand: Expand,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attends from new tokens over keys and values expanded from latents, then compresses the layer.

    The expanded tensors of the layer's past and of the new tokens exist during this call only.

    Args:
        layer: index of the layer within the store.
        query: query states of the model, [batch, query_heads, tokens, head_dim].
        new: rotary keys and latents of the new tokens, [batch, 1, tokens, dim] each.
        softmax, valid, mask: as in `attend_tokens`.

    Returns:
        Attention output of the model, [batch, query_heads, tokens, value_dim].

    Raises:
        ValueError, MemoryError: as in `attend_tokens`.
    """
    rope, latent = new
    entering = Entering.checked(store, layer, rope, latent, valid)
    past = Past.read(store, layer, entering)
    note_logits(store, layer, softmax)
    options = {"valid": valid, "mask": mask, "observed": store.observation_window if store.layout.selects else 0}
    key, value = expand(latent, rope)
    earlier = _expanded(store, layer, past.earlier, expand)
    if _is_plain(store, softmax, earlier, valid, mask):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax.scaling)
        received = None
    else:
        output, received = prefill_attention(query, key, value, softmax, past=earlier, **options)
    # a token's significance is the maximum over the heads that read it
    received = None if received is None else received.amax(1, keepdim=True).float()
    compress(store, layer, past, entering, received, None)
    return output


def _is_plain(store: Store, softmax: Softmax, past: EarlierTokens, valid: Tensor | None, mask: Tensor | None) -> bool:
    """Returns whether PyTorch's own attention suffices, which Transformers' caches use too."""
    given = (softmax.softcap, softmax.sinks, valid, mask)
    return not store.layout.selects and past.tokens == 0 and all(each is None for each in given)


def _expanded(store: Store, layer: int, past: EarlierTokens, expand: Expand) -> EarlierTokens:
    """Returns stored tokens as exact keys and values of all heads."""
    stored = dense_tokens(past)
    if stored is None:
        return past
    rope, latent, valid = stored
    rope, latent = model_keys(store, layer, rope).to(store.dtype), model_form(store, latent).to(store.dtype)
    key, value = expand(latent, rope)
    return EarlierTokens(key=key, value=value, valid=valid.expand(-1, key.shape[1], -1))
