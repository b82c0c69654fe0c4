"""`until_full` in continuous batching, where a request's text depends on its neighbours then: only if it is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_diffkv.cache.resolve import resolve_config
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.until_full import AUTO, final_precisions
from hf_diffkv.precision import Precision


def lowers(config: DiffKVConfig) -> bool:
    """Returns whether rows are lowered when a budget is full; continuous batching needs it asked for by name."""
    return isinstance(config.until_full, Precision)


def config_of_slots(model: Any, config: DiffKVConfig | Mapping | str | None, fields: Mapping[str, Any]) -> DiffKVConfig:
    """Returns `resolve_config`, in which a budget alone chooses no precisions to lower heads to."""
    if isinstance(config, DiffKVConfig):
        return resolve_config(model, config, dict(fields))
    given = {"preset": config} if isinstance(config, str) else dict(config or {})
    return resolve_config(model, None, {"until_full": None, **given, **fields})


def rung_config(config: DiffKVConfig) -> DiffKVConfig:
    """Returns the configuration of slots and of kept prefixes: that of the user without the budget.

    If rows are lowered it has both rungs, the final one for whatever does not say which it has.

    Raises:
        ValueError: rows are to be lowered and heads have several final precisions.
    """
    if not lowers(config):
        return replace(config, max_bytes=None, until_full=AUTO)
    finals = {precision for layer in final_precisions(config) or () for precision in layer}
    if len(finals) != 1:
        raise ValueError(
            f"until_full={config.until_full.name} needs one final precision for all heads in continuous batching; "
            "leave until_full out, so that a full budget makes requests wait, or give all heads one precision, such as "
            'high="K5V4" and low="K5V4".'
        )
    if config.until_full in finals:
        raise ValueError(
            f"until_full={config.until_full.name} must need more bits than the final precision; raise until_full, or "
            "lower high and low."
        )
    rungs = {"high": config.until_full, "low": finals.pop(), "alpha_high": math.inf, "alpha_low": 0.0}
    return replace(config, max_bytes=None, until_full=AUTO, head_precisions=None, **rungs)
