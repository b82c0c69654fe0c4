"""Chooses the configuration of a cache: the requested one, or the one that suits the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.diffkv_config import DiffKVConfig, configuration_of


def config_of(model: Any) -> Any:
    """Returns the configuration of `model`. Raises `ValueError` if it is not a model."""
    model_config = configuration_of(model)
    if model_config is model or not hasattr(model_config, "get_text_config"):
        raise ValueError(f"model is a {type(model).__name__}; pass the model itself, not its configuration or name.")
    return model_config


def resolve_config(model: Any, config: DiffKVConfig | Mapping | str | None, fields: dict[str, Any]) -> DiffKVConfig:
    """Applies single fields to `config`, or to the configuration that suits the model.

    Args:
        model: model or its configuration.
        config: configuration, its fields, or the name of a preset; None takes `DiffKVConfig.for_model`.
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
            raise ValueError(f"{name} chooses a configuration; leave it out, or give no config beside it.")
    return DiffKVConfig.from_dict({**config.to_dict(), **fields}) if fields else config
