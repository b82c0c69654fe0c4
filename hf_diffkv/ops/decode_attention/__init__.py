"""Attention of one new token per request over pages and window, updating significance sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...pages import LayerRows
from ..backend import KERNELS, NATIVE, REFERENCE, choose, use_kernels, without_autocast
from ..softmax import Held, Softmax
from ..tiles import Bounds
from . import native, reference

if TYPE_CHECKING:
    from .scratch import Scratch

__all__ = ["Held", "allocate_scratch", "decode_attention", "scratch_bytes"]


@without_autocast
def decode_attention(
    query: Tensor,
    rows: LayerRows,
    softmax: Softmax,
    *,
    bounds: Bounds,
    valid: Tensor | None = None,
    scratch: Scratch | None = None,
    held: Held | None = None,
) -> Tensor:
    """Attends from the newest token of every request; further arguments and result as in the reference.

    Args:
        bounds: the host's upper bounds on the rows' lengths.
        scratch: buffers from `allocate_scratch`; None allocates new ones.
    """
    backend = choose(query.device, query.dtype, rows.layout.high, rows.layout.low)
    # absorbed queries (store/latent.py) have the key's and the value's dimensions, and no kernels
    if backend == KERNELS and query.shape[-1] != rows.layout.high.key_dim:
        backend = REFERENCE
    if backend == NATIVE:
        return native.decode_attention(query, rows, softmax, valid=valid, held=held)
    if backend == KERNELS:
        from . import launch

        own = {"max_tokens": bounds.max_tokens, "scratch": scratch}
        return launch.decode_attention(query, rows, softmax, valid=valid, held=held, **own)
    return reference.decode_attention(query, rows, softmax, valid=valid, held=held, tiles=bounds.tiles)


def allocate_scratch(query: Tensor, rows: LayerRows, max_tokens: int) -> Scratch | None:
    """Allocates buffers that the kernels reuse from step to step; returns None if no kernels run.

    Args:
        query: query states, [batch, query_heads, key_dim]; only the shape, dtype and device matter.
        rows: rows to attend to.
        max_tokens: upper bound on the tokens of any row, window included.
    """
    if not use_kernels(query.device, query.dtype):
        return None
    from .scratch import Scratch

    return Scratch.allocate(query, rows, max_tokens)


def scratch_bytes(query: Tensor, rows: LayerRows, max_tokens: int, requests: int) -> int:
    """Returns the bytes that `allocate_scratch` would take for `requests` requests instead of those of `rows`."""
    if not use_kernels(query.device, query.dtype):
        return 0
    from .scratch import Scratch

    planned = Scratch.allocate(query, rows, max_tokens, planned=requests)
    return sum(tensor.numel() * tensor.element_size() for tensor in planned.tensors())
