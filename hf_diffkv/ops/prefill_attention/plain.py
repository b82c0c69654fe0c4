"""Leaves attention of which only the output is needed to PyTorch where that is faster than native code."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ...pages import EarlierTokens
from ..softmax import Softmax
from . import native
from .cpu import fastest

# below, PyTorch takes less time than native code, by up to a millisecond (docs/latent.md)
NATIVE_TOKENS = 128


def attend_plainly(
    prefill_attention: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax: Softmax,
    *,
    past: EarlierTokens,
    valid: Tensor | None,
    mask: Tensor | None,
    observed: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Attends by PyTorch or by the given op.

    PyTorch attends if attention is causal among the new tokens alone and unobserved, unless these are many and native
    code can attend.

    Args:
        prefill_attention: op that is given all further arguments, and whose results are returned.
        key, value: keys and values of as many heads as the query has.
    """
    special = (softmax.softcap, softmax.sinks, valid, mask)
    plain = observed == 0 and past.tokens == 0 and all(each is None for each in special)
    many = query.shape[2] >= NATIVE_TOKENS
    if plain and not (many and fastest(query, key, value, softmax, past, mask) is native):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax.scaling), None
    return prefill_attention(query, key, value, softmax, past=past, valid=valid, mask=mask, observed=observed)
