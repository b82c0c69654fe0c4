"""Finds the configuration of a cache: what was asked for, or what suits the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.diffkv_config import DiffKVConfig, configuration_of


def config_of(model: Any) -> Any:
    """The configuration of `model`. Raises `ValueError` where it is not a model."""
    model_config = configuration_of(model)
    if model_config is model or not hasattr(model_config, "get_text_config"):
        raise ValueError(f"model is a {type(model).__name__}; pass the model itself, not its configuration or name.")
    return model_config


def resolve_config(model: Any, config: DiffKVConfig | Mapping | str | None, fields: dict[str, Any]) -> DiffKVConfig:
    """`config`, or what suits the model, with single fields on top. Raises `ValueError` as `DiffKVConfig` does.

    Args:
        model: the model or its configuration.
        config: a configuration, fields of one, or the name of a preset.
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
            raise ValueError(f"{name} chooses a configuration; leave it out, or give no config beside it.")
    return DiffKVConfig.from_dict({**config.to_dict(), **fields}) if fields else config
