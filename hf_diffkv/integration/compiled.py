"""The whole of a layer's attention as one opaque operator, so that a decode forward compiles into one graph.

Inside a compiled graph a layer is named by an integer. The operator declares that it mutates a tensor all layers share,
which keeps it from being reordered or dropped; the compiler may pass a copy of that tensor, so it holds no data.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .layer import DiffKVLayer

_handles = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, DiffKVLayer] = weakref.WeakValueDictionary()


def new_handle(layer: DiffKVLayer) -> int:
    """A number under which compiled graphs find `layer` while it lives."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


@torch.library.custom_op("hf_diffkv::attend", mutates_args=("order",))
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    sinks: Tensor | None,
    order: Tensor,
    handle: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """`DiffKVLayer.update` and `attend` in one. Shapes as there.

    Args:
        visible: bool [batch, past + tokens], what is not padding or hidden; None where nothing is.
        order: shared by the layers of a cache, never read.
        handle: from `new_handle`.
    """
    layer = _layers[handle]
    layer.update(key, value)
    past = layer.seen - key.shape[2]
    shown, valid = (None, None) if visible is None else (visible[:, :past], visible[:, past:])
    return layer.attend(query, valid, None, scaling, softcap, sinks, shown).contiguous()


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    sinks: Tensor | None,
    order: Tensor,
    handle: int,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
