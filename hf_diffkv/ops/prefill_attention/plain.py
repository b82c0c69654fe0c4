"""Leaves attention of which only the output is needed to PyTorch, as Transformers' own caches do."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ...pages import EarlierTokens
from ..softmax import Softmax


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
    """Attends by PyTorch if attention is causal among the new tokens alone and unobserved, else by the given op.

    Args:
        prefill_attention: op that is given all further arguments, and whose results are returned.
        key, value: keys and values of as many heads as the query has.
    """
    special = (softmax.softcap, softmax.sinks, valid, mask)
    if observed == 0 and past.tokens == 0 and all(each is None for each in special):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=softmax.scaling), None
    return prefill_attention(query, key, value, softmax, past=past, valid=valid, mask=mask, observed=observed)
