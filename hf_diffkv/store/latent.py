"""Attention of layers that cache latents (docs/latent.md).

Such a layer has one KV head. Its key is the rotary part of all heads' keys, [batch, 1, tokens, rope_dim], and its value
is the latent, [batch, 1, tokens, rank]. A projection of the latent gives each head its value and the rest of its key.

An absorbed query has both parts: the rotary query, then the rest of the query multiplied by the projection of keys. It
is [batch, query_heads, tokens, rope_dim + rank]. Its logits are its products with key and value together, and its
output, a weighted sum of latents, is multiplied by the projection of values. Nothing is ever computed per token and
head, which makes steps fast. For a prompt, it is cheaper to expand the latents into keys and values of all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.prefill_attention.plain import attend_plainly
from ..ops.prefill_attention.reference import dense_tokens
from ..ops.softmax import Softmax
from ..ops.table import ops_for
from ..pages import EarlierTokens
from .prompt import PromptAttention, StoredPast
from .state import Store
from .transform import model_form, model_keys

# turns latents and rotary keys, [batch, 1, tokens, dim], into keys and values of all heads, [batch, heads, tokens, dim]
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ExpandedAttention(PromptAttention):
    """New tokens that attend over keys and values expanded from latents, and are then compressed.

    The expanded tensors of the layer's past and of the new tokens exist only while they are attended to. Queries,
    [batch, query_heads, tokens, head_dim], and output are in the model's form.

    Args:
        expand: how to expand latents.
        others: arguments of `PromptAttention`; keys are rotary keys and values latents, [batch, 1, tokens, dim].
    """

    def __init__(self, expand: Expand, *others: Any) -> None:
        super().__init__(*others)
        self._expand = expand

    def _attend(self, past: StoredPast, query: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
        store, layer, new = self._store, self._layer, self._new
        store.note_logits(layer, softmax)
        key, value = self._expand(new.value, new.key)
        earlier = _expanded(store, layer, past.earlier, self._expand)
        options = {"valid": new.valid, "mask": self._mask, "observed": store.observation_window}
        # keys and values of all heads, for which there are kernels
        prefill_attention = ops_for(store.device, store.dtype).prefill_attention
        output, received = attend_plainly(prefill_attention, query, key, value, softmax, past=earlier, **options)
        # a token's significance is the maximum over the heads that read it
        return output, None if received is None else received.amax(1, keepdim=True).float()


def _expanded(store: Store, layer: int, past: EarlierTokens, expand: Expand) -> EarlierTokens:
    """Returns stored tokens as exact keys and values of all heads."""
    stored = dense_tokens(past)
    if stored is None:
        return past
    rope, latent, valid = stored
    rope, latent = model_keys(store, layer, rope).to(store.dtype), model_form(store, latent).to(store.dtype)
    key, value = expand(latent, rope)
    return EarlierTokens(key=key, value=value, valid=valid.expand(-1, key.shape[1], -1))
