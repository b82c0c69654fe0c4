"""Several new tokens whose keys and values later layers of the model read as well.

The queries of reader layers count as further query heads of the KV head: a token's sum gains the maximum over all of
them. A prompt is therefore compressed, and a step's sums are updated, when the last of these layers has attended. A
reader may attend from the newest tokens only, because models drop the tokens that need no logits. The attention that
keys received from them is scaled up to all later queries, as with `observation_window`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from .forms import Entering, query_moment
from .lowering import make_room_for_prompt
from .prompt import Past, attend_beside, compress
from .state import Store


class SharedTokens:
    """Several new tokens that several layers attend to. Arguments and errors as in `attend_tokens`."""

    def __init__(
        self, store: Store, layer: int, key: Tensor, value: Tensor, valid: Tensor | None, mask: Tensor | None
    ) -> None:
        self._store, self._layer = store, layer
        self._new, self._mask = Entering.checked(store, layer, key, value, valid), mask
        if store.lowering.active:
            make_room_for_prompt(store, key.shape[2], valid)
        self._received: Tensor | None = None
        self._moment: Tensor | None = None

    def attend(self, query: Tensor, last: bool, softmax: Softmax) -> Tensor:
        """Returns one layer's attention output, from all tokens or the newest ones; compresses them after the last."""
        store, layer = self._store, self._layer
        past = Past.read(store, layer, self._new)
        output, received = attend_from_newest(store, layer, past, query, self._new, self._mask, softmax)
        if received is not None:
            self._received = received if self._received is None else torch.maximum(self._received, received)
        moment = query_moment(store, query, self._new.valid)
        self._moment = moment if self._moment is None else self._moment + moment
        if last:
            compress(store, layer, past, self._new, self._received, self._moment)
        return output


def attend_from_newest(
    store: Store, layer: int, past: Past, query: Tensor, new: Entering, mask: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor | None]:
    """Attends from the newest n of the Q new tokens over a layer's past and all new tokens; changes nothing.

    Args:
        query: query states, [batch, query_heads, n, key_dim]. With n < Q, all n must see the same earlier tokens.
        mask: attention mask among the new tokens, bool [batch, 1, Q, Q]; None is causal.

    Returns:
        The attention output, [batch, query_heads, n, value_dim], and the attention each key received, as
        `attend_beside` returns it.
    """
    (key, value), valid = new.beside(past.earlier), new.valid
    earlier = key.shape[2] - query.shape[2]
    if earlier == 0:
        options = {"valid": valid, "mask": mask, "observed": store.observation_window}
        return attend_beside(store, layer, past.earlier, query, key, value, softmax, **options)
    shown = torch.ones(key.shape[0], earlier, dtype=torch.bool, device=key.device)
    shown = shown if valid is None else shown & valid[:, :earlier]
    shown = shown if mask is None else shown & mask[:, 0, -1, :earlier]
    exact = {"key": key[:, :, :earlier], "value": value[:, :, :earlier]}
    before = replace(past.earlier, **exact, valid=shown[:, None].expand(-1, key.shape[1], -1))
    output, received = attend_beside(
        store,
        layer,
        before,
        query,
        key[:, :, earlier:],
        value[:, :, earlier:],
        softmax,
        valid=None if valid is None else valid[:, earlier:],
        mask=None if mask is None else mask[..., earlier:, earlier:],
        observed=store.observation_window,
    )
    if received is not None:
        received = received * _later_share(valid, key, earlier, received.shape[-1])[:, None]
    return output, received


def _later_share(valid: Tensor | None, key: Tensor, earlier: int, columns: int) -> Tensor:
    """Returns, for each key, the ratio of all later queries to those that attended.

    The queries that attended are those after the first `earlier` new tokens.

    Returns:
        Ratio of each of the P + Q keys, float32 [batch, P + Q].
    """
    if valid is None:
        valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    later = valid.flip(-1).cumsum(-1).flip(-1) - valid.long()
    there = valid[:, earlier:].sum(-1, keepdim=True)
    follow = torch.cat([valid.sum(-1, keepdim=True).expand(-1, columns - key.shape[2]), later], dim=-1)
    share = follow.float() / there.clamp(min=1).float()
    # for these keys, all later queries attended
    share[:, columns - key.shape[2] + earlier :] = 1.0
    return share
