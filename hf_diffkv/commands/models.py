"""What a command asks of a model before it starts: that it exists, is supported, and takes so many tokens."""

from __future__ import annotations

import logging
from typing import Any

import click

from ..evaluation.models import missing, resolve_model
from .console import one_line


def supported_config(name: str) -> Any:
    """The configuration of a model that DiffKV works with.

    Raises:
        click.UsageError: it cannot be loaded, or DiffKV does not work with it.
    """
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
    """The model's tokenizer. Raises `click.UsageError` where it cannot be loaded."""
    from transformers import AutoTokenizer

    return loaded(AutoTokenizer, name)


def loaded(factory: Any, name: str) -> Any:
    """`factory.from_pretrained` of what `name` stands for. Raises `click.UsageError` where it fails."""
    # the error says it all
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return factory.from_pretrained(resolve_model(name))
    except (OSError, ValueError, KeyError) as error:
        raise click.UsageError(f"cannot load the model {name}: {missing(name)}{one_line(error)}") from error


def position_limit(config: Any) -> int | None:
    """How many tokens the model takes; None where its configuration does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def usable_device(given: str | None) -> str:
    """The device to run on. Raises `click.UsageError` where it cannot be used."""
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=given).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise click.UsageError(f"--device {given} cannot be used: {str(error).splitlines()[0]}") from error
    return given
