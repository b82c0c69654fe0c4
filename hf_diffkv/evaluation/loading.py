"""The model of an evaluation, its configuration and its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import EvaluationError
from .models import resolve_model


def load_config(name: str) -> tuple[Any, Any]:
    """Configuration and tokenizer: enough to make documents before the weights are loaded.

    Args:
        name: a Hub id, a folder or a short name.

    Raises:
        EvaluationError: they cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _loading(name):
        path = resolve_model(name)
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def load_model(name: str, dtype: str = "auto", device: str | None = None, quiet: bool = False) -> Any:
    """The model, ready to run.

    Args:
        name: as of `load_config`.
        dtype: "auto" or the name of one of PyTorch's.
        device: None takes a GPU where there is one.
        quiet: no progress bars of Transformers.

    Raises:
        EvaluationError: it cannot be loaded, or not onto the device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    hide_progress_bars(quiet)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {device} cannot be used: {str(error).splitlines()[0]}") from error
    with _loading(name):
        chosen = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=chosen)
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def hide_progress_bars(quiet: bool) -> None:
    """Of Transformers, where nobody would see them move or wants them."""
    from transformers.utils import logging

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EvaluationError(f"cannot load the model {name}: {' '.join(str(error).split())}") from error
