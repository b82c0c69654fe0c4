"""`until_full` in continuous batching, where a request's text depends on its neighbours then: only if it is named."""

from __future__ import annotations

import math
from dataclasses import replace

from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.until_full import AUTO, only_precision
from hf_diffkv.precision import Precision


def lowers(config: DiffKVConfig) -> bool:
    """Returns whether rows are lowered when a budget is full; continuous batching needs it asked for by name."""
    return isinstance(config.until_full, Precision)


def rung_config(config: DiffKVConfig) -> DiffKVConfig:
    """Returns the configuration of slots and of kept prefixes: that of the user without the budget.

    If rows are lowered it has both rungs, the final one for whatever does not say which it has.

    Raises:
        ValueError: rows are to be lowered and heads have several final precisions.
    """
    if not lowers(config):
        return replace(config, max_bytes=None)
    final = only_precision(config)
    if final is None:
        raise ValueError(
            f"until_full={config.until_full.name} needs one final precision for all heads in continuous batching; "
            "leave until_full out, so that a full budget makes requests wait, or take a preset of one precision."
        )
    rungs = {"high": config.until_full, "low": final, "alpha_high": math.inf, "alpha_low": 0.0}
    return replace(config, max_bytes=None, until_full=AUTO, head_precisions=None, **rungs)
