"""The whole of a layer's attention as one opaque operator, so that a forward compiles into one graph.

Inside a compiled graph a layer is named by a number. It comes as a tensor, so that a graph serves every cache whose
layers have the same shapes. The operator declares that it mutates a tensor all layers share, which keeps it from being
reordered or dropped; the compiler may pass copies of both tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.softmax import Softmax
from .handles import layer_of
from .layer import DiffKVLayer
from .masks import split_mask

# what the operator does on the host must not be lost in a graph that the compiler captures (older releases: no tag)
_TAGS = [tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None]


@torch.library.custom_op("hf_diffkv::attend", mutates_args=("order",), tags=_TAGS)
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
    """`DiffKVLayer.update` and `attend` in one, or `read`; within a captured step `attend_captured`. Shapes as there.

    Args:
        states: query, key and value.
        mask: as the attention function gets it.
        order: shared by the layers of a cache, never read.
        handle: from `handles.new_handle`.
        reads: the keys and values are those of an earlier layer of the model, whose mask holds for this one too.
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
    """What the operator does, arguments as there."""
    if layer.stores.capturing:
        return layer.attend_captured(query, key, value, mask, softmax).contiguous()
    if reads:
        return layer.read(query, key, mask, softmax).contiguous()
    if layer.pending is None:  # else it was announced outside of the graph
        layer.update(key, value)
    shown, valid, among = split_mask(mask, layer, key.shape[2])
    output = layer.attend(query, softmax, valid, among, shown).contiguous()
    layer.expect(mask)
    return output


@attend.register_fake
def _(
    states: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    order: Tensor,
    handle: Tensor,
    reads: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    query, _, value = states
    return query.new_empty(*query.shape[:3], value.shape[3])
