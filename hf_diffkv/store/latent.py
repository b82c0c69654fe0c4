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

from torch import Tensor

from ..ops.prefill_attention.plain import attend_plainly
from ..ops.prefill_attention.reference import dense_tokens
from ..ops.softmax import Softmax
from ..ops.table import ops_for
from ..pages import EarlierTokens
from .prompt import StoredPast, admitted, compress
from .state import Store
from .transform import model_form, model_keys

# turns latents and rotary keys, [batch, 1, tokens, dim], into keys and values of all heads, [batch, heads, tokens, dim]
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ExpandedAttention:
    """New tokens that attend over keys and values expanded from latents, and are then compressed.

    The expanded tensors of the layer's past and of the new tokens exist during `attend` only.

    Args:
        layer: index of the layer within the store.
        rope, latent: rotary keys and latents of the new tokens, [batch, 1, tokens, dim].
        expand: how to expand latents.
        valid, mask: arguments of `PromptAttention`.

    Raises:
        ValueError: keys or values are not finite.
        MemoryError: the tokens do not fit into `max_bytes` with `until_full`; nothing has changed.
    """

    def __init__(
        self,
        store: Store,
        layer: int,
        rope: Tensor,
        latent: Tensor,
        expand: Expand,
        valid: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        self._store, self._layer, self._expand, self._mask = store, layer, expand, mask
        self._new = admitted(store, layer, rope, latent, valid)
        self._dense = rope, latent

    def attend(self, query: Tensor, softmax: Softmax, last: bool = True) -> Tensor:
        """Returns attention output of the model, [batch, query_heads, tokens, value_dim].

        Args:
            query: query states of the model, [batch, query_heads, tokens, head_dim].
            last: unused; no later layer reads latents.

        Raises:
            MemoryError: the tokens do not fit.
        """
        store, layer, (rope, latent) = self._store, self._layer, self._dense
        past = StoredPast.read(store, layer, self._new)
        store.note_logits(layer, softmax)
        key, value = self._expand(latent, rope)
        earlier = _expanded(store, layer, past.earlier, self._expand)
        options = {"valid": self._new.valid, "mask": self._mask, "observed": store.observation_window}
        # keys and values of all heads, for which there are kernels
        prefill_attention = ops_for(store.device, store.dtype).prefill_attention
        output, received = attend_plainly(prefill_attention, query, key, value, softmax, past=earlier, **options)
        # a token's significance is the maximum over the heads that read it
        received = None if received is None else received.amax(1, keepdim=True).float()
        compress(store, layer, past, self._new, received, None)
        return output


def _expanded(store: Store, layer: int, past: EarlierTokens, expand: Expand) -> EarlierTokens:
    """Returns stored tokens as exact keys and values of all heads."""
    stored = dense_tokens(past)
    if stored is None:
        return past
    rope, latent, valid = stored
    rope, latent = model_keys(store, layer, rope).to(store.dtype), model_form(store, latent).to(store.dtype)
    key, value = expand(latent, rope)
    return EarlierTokens(key=key, value=value, valid=valid.expand(-1, key.shape[1], -1))
