"""The model of an evaluation and its tokenizer."""

from __future__ import annotations

import sys
from typing import Any

from .errors import EvaluationError
from .models import resolve_model


def load(name: str, dtype: str = "auto", device: str | None = None, quiet: bool = False) -> tuple[Any, Any]:
    """Tokenizer and model.

    Args:
        name: a Hub id, a folder or a short name.
        dtype: "auto" or the name of one of PyTorch's.
        device: None takes a GPU where there is one.
        quiet: no progress bars of Transformers.

    Raises:
        EvaluationError: it cannot be loaded, or not onto the device.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {device} cannot be used: {str(error).splitlines()[0]}") from error
    try:
        path = resolve_model(name)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EvaluationError(f"cannot load the model {name}: {' '.join(str(error).split())}") from error
    return tokenizer, model.eval()
