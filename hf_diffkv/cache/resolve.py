"""Chooses a cache's configuration, the requested one or the model's, and looks up its query moments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..config.diffkv_config import DiffKVConfig, configuration_of
from ..heads.allocation import SENSITIVITY
from ..heads.harm import HarmBetween, harm_of
from ..heads.lookup import measured_of, queries_of, suggest_query_calibration
from ..heads.query_moments import QueryMoments
from ..heads.sensitivity import Sensitivity
from ..ops.rounding import LARGEST_BITS


def config_of(model: Any) -> Any:
    """Returns the configuration of `model`. Raises `ValueError` if it is not a model."""
    model_config = configuration_of(model)
    if model_config is model or not hasattr(model_config, "get_text_config"):
        raise ValueError(f"model is a {type(model).__name__}; pass the model itself, not its configuration or name.")
    return model_config


def resolve_config(model: Any, config: DiffKVConfig | Mapping | str | None, fields: dict[str, Any]) -> DiffKVConfig:
    """Applies individual fields to `config`, or to the configuration that suits the model.

    Args:
        model: model or its configuration.
        config: configuration, its fields, or the name of a preset; None uses `DiffKVConfig.for_model`.
        fields: fields of `DiffKVConfig` that override `config`.

    Raises:
        ValueError: unknown or invalid fields, or `preset` or `target_ratio` given together with a configuration.
    """
    if isinstance(config, str):
        config = {"preset": config}
    if isinstance(config, Mapping):
        fields, config = {**config, **fields}, None
    if config is not None and not isinstance(config, DiffKVConfig):
        raise ValueError(f"config={config!r} must be a DiffKVConfig, a dict of its fields, or a preset's name.")
    if config is None:
        return DiffKVConfig.for_model(model, **fields)
    for name in ("preset", "target_ratio"):
        if name in fields:
            raise ValueError(f"{name} chooses a configuration; leave out either it or config.")
    return DiffKVConfig.from_dict({**config.to_dict(), **fields}) if fields else config


def moments_for(model: Any, config: DiffKVConfig) -> QueryMoments | None:
    """Loads the moments used to round keys of generated tokens.

    Args:
        model: loaded model, or its configuration; for a configuration, only a file next to it is found.
        config: cache configuration.

    Returns:
        The moments; None if none were measured, or if `config` does not round keys for queries.

    Raises:
        ValueError: the file does not hold query moments.
    """
    if not config.adaptive_rounding or not _has_few_bits(config):
        return None
    path = queries_of(model)
    if path is None:
        if config.head_precisions is not None:
            suggest_query_calibration(model)
        return None
    return QueryMoments.load(path)


def harm_for(model: Any, config: DiffKVConfig, num_layers: int) -> HarmBetween | None:
    """Returns the loss from lowering heads of a measured model; None if it is unknown or nothing is lowered.

    Args:
        model: loaded model, or its configuration, for which only `config.calibration` is used.
        num_layers: number of compressed layers.
    """
    if config.precise is None or not num_layers:
        return None
    calibration = config.calibration or {}
    kept = calibration.get(SENSITIVITY)
    measured = measured_of(model) if kept is None else Sensitivity.from_dict(kept)
    if measured is None or len(measured.shapes) != num_layers:
        return None
    return partial(harm_of, measured)


def _has_few_bits(config: DiffKVConfig) -> bool:
    layers = config.head_precisions or (None,)
    chosen = {precision for layer in layers for precision in layer or (None,)}
    if None in chosen:
        chosen |= {config.high, config.low}
    return min(precision.k_bits for precision in chosen if precision is not None) <= LARGEST_BITS
