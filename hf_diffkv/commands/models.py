"""Checks before a command starts that a model exists, is supported, and accepts enough tokens."""

from __future__ import annotations

import logging
from typing import Any

import click

from ..running.models import missing, resolve_model
from .console import one_line


def supported_config(name: str) -> Any:
    """Loads a model's configuration. Raises `click.UsageError` unless it exists and DiffKV supports it."""
    from transformers import AutoConfig

    from ..cache.errors import UnsupportedModelError
    from ..cache.supported_models import cache_layers, check_model_config

    config = loaded(AutoConfig, name)
    try:
        check_model_config(config)
        cache_layers(config.get_text_config(decoder=True))
    except UnsupportedModelError as error:
        raise click.UsageError(f"--model {name}: {one_line(error)}") from error
    return config


def load_tokenizer(name: str) -> Any:
    """Loads the model's tokenizer. Raises `click.UsageError` if it cannot be loaded."""
    from transformers import AutoTokenizer

    return loaded(AutoTokenizer, name)


def loaded(factory: Any, name: str) -> Any:
    """Calls `factory.from_pretrained` for the model `name`. Raises `click.UsageError` if it fails."""
    # hides warnings, as the error says enough
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return factory.from_pretrained(resolve_model(name))
    except (OSError, ValueError, KeyError) as error:
        raise click.UsageError(f"cannot load the model {name}: {missing(name)}{one_line(error)}") from error


def position_limit(config: Any) -> int | None:
    """Returns the model's maximum number of tokens, or None if its configuration does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def usable_device(given: str | None) -> str:
    """Returns the device to run on. Raises `click.UsageError` if it cannot be used."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise click.UsageError(f"--device {given} cannot be used: {str(error).splitlines()[0]}") from error
    return given
