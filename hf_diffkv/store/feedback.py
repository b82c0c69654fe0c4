"""What the queries of a forward say about how the keys that it stores are to be rounded (ops/rounding).

It is taken from the prompt, the turn or the chunk itself and then forgotten: it takes no memory between forwards.
Tokens that leave the window while generating are rounded each for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..ops.rounding import LARGEST_BITS, feedback_of, second_moment

if TYPE_CHECKING:
    from .state import Store


def query_moment(store: Store, query: Tensor, valid: Tensor | None) -> Tensor | None:
    """`second_moment` of queries [batch, query_heads, n, key_dim] of the model; None where keys are rounded plainly.

    Args:
        valid: bool [batch, Q] of the Q >= n new tokens, of which these are the newest; None where all are real.
    """
    bits = min(store.layout.high.k_bits, store.layout.low.k_bits)
    if not store.config.adaptive_rounding or bits > LARGEST_BITS:
        return None
    valid = None if valid is None else valid[:, valid.shape[1] - query.shape[2] :]
    return second_moment(query, store.num_heads, valid)


def feedback(store: Store, moment: Tensor | None) -> Tensor | None:
    """[rows, key_dim, key_dim], as `round_keys` takes it for keys in the store's form."""
    return None if moment is None else feedback_of(moment, store.key_rotation)
