"""The moments of a model's queries, for caches of it."""

from __future__ import annotations

from typing import Any

from ..config import DiffKVConfig
from ..config.found import queries_of, tell_of_queries
from ..ops.rounding import LARGEST_BITS
from ..store.query_moments import QueryMoments


def moments_for(model: Any, config: DiffKVConfig) -> QueryMoments | None:
    """What generated keys are rounded by; None where nobody measured it, or where `config` rounds none.

    Args:
        model: a loaded model, or its configuration, for which only a file beside it is found.

    Raises:
        ValueError: a file that does not hold moments.
    """
    if not config.adaptive_rounding or not _has_few_bits(config):
        return None
    path = queries_of(model)
    if path is None:
        if config.head_precisions is not None:
            tell_of_queries(model)
        return None
    return QueryMoments.load(path)


def _has_few_bits(config: DiffKVConfig) -> bool:
    layers = config.head_precisions or (None,)
    chosen = {precision for layer in layers for precision in layer or (None,)}
    if None in chosen:
        chosen |= {config.high, config.low}
    return min(precision.k_bits for precision in chosen if precision is not None) <= LARGEST_BITS
