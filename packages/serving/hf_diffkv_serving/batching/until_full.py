"""`until_full` in continuous batching: only if named, as a request's text then depends on its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_diffkv.cache.resolve import resolve_config
from hf_diffkv.config import DiffKVConfig
from hf_diffkv.config.until_full import AUTO, final_precisions, rungs_of
from hf_diffkv.precision import Precision

# budget in bytes that no request fills
NEVER_FULL = 1 << 40


def lowers(config: DiffKVConfig) -> bool:
    """Returns whether rows are lowered when a budget is full: in continuous batching, only on request."""
    return isinstance(config.until_full, Precision)


def config_of_slots(model: Any, config: DiffKVConfig | Mapping | str | None, fields: Mapping[str, Any]) -> DiffKVConfig:
    """Returns the result of `resolve_config`, but a budget alone chooses no precisions to lower heads to."""
    if isinstance(config, DiffKVConfig):
        return resolve_config(model, config, dict(fields))
    given = {"preset": config} if isinstance(config, str) else dict(config or {})
    return resolve_config(model, None, {"until_full": None, **given, **fields})


def rung_config(config: DiffKVConfig) -> DiffKVConfig:
    """Returns the configuration of kept prefixes: the user's without the budget.

    If rows are lowered, it has a budget that is never full instead, so that a layer has both rungs there too.

    Raises:
        ValueError: rows are to be lowered, but all heads begin at their final precision.
    """
    if not lowers(config):
        return replace(config, max_bytes=None, until_full=AUTO)
    layers = range(len(final_precisions(config) or ()))
    if all(rungs_of(config, index).alpha_high == 0.0 for index in layers):
        raise ValueError(
            f"until_full={config.until_full.name} must need more bits than the final precision; raise until_full, or "
            "lower high and low."
        )
    return replace(config, max_bytes=NEVER_FULL)


def layer_of_slots(of_layer: DiffKVConfig) -> DiffKVConfig:
    """Returns the configuration of a layer's slots, whose budget is that of all slots together.

    Args:
        of_layer: configuration of the layer (`DiffKVConfig.of_layer`) by `rung_config`. Its rungs stay.
    """
    return replace(of_layer, max_bytes=None, until_full=AUTO)
