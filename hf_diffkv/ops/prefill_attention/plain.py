"""Leaves attention to PyTorch where only its output is needed and PyTorch is faster than native code."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ...pages import EarlierTokens
from ..softmax import Softmax
from . import native
from .cpu import fastest

# below this, PyTorch is faster than native code by up to a millisecond (docs/latent.md)
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
    """Attends with PyTorch or with the given op.

    PyTorch attends if attention is causal, unobserved and only among the new tokens, unless there are many of these
    and `fastest` chooses native code.

    Args:
        prefill_attention: op that receives all other arguments and whose results are returned.
        key, value: keys and values with as many heads as the query.
    """
    special = (softmax.softcap, softmax.sinks, valid, mask)
    plain = observed == 0 and past.tokens == 0 and all(each is None for each in special)
    many = query.shape[2] >= NATIVE_TOKENS
    if plain and not (many and fastest(query, key, value, softmax, mask) is native):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax.scaling), None
    return prefill_attention(query, key, value, softmax, past=past, valid=valid, mask=mask, observed=observed)
