"""Resolves short model names to Hub ids or local copies, and loads models."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..arguments import similar
from ..evaluation.errors import EvaluationError, one_line

CHECKOUT = Path(__file__).resolve().parents[2]
TINY_LM = CHECKOUT / "examples" / "models" / "tiny-lm"
# folder where `make models` puts models, one subfolder per short name
MODELS_FOLDER = CHECKOUT / "build" / "models"
HUB_IDS = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
}
# bits of weights that bitsandbytes quantises to
WEIGHTS = ("4bit", "8bit")
# default model for a quick try; wheels do not contain tiny-lm
SMALLEST_MODEL = "tiny-lm" if (TINY_LM / "config.json").is_file() else "smollm2"


def resolve_model(name: str) -> str:
    """Returns the argument for `from_pretrained`, without loading anything or using the network.

    An existing folder is returned unchanged. A short name, or its Hub id, becomes the copy made by `make models`, or
    the Hub id if there is no copy. "tiny-lm" is the model in the checkout. Other names are returned unchanged.

    Raises:
        ValueError: the path of a folder does not exist, a name without an owner looks like a misspelt short name, or
            "tiny-lm" is given outside a checkout.
    """
    if Path(name).is_dir():
        return name
    if _is_path(name):
        raise ValueError(f"there is no folder {name!r}.")
    if name == "tiny-lm":
        if not (TINY_LM / "config.json").is_file():
            raise ValueError("tiny-lm comes only with a checkout of the project; give smollm2, a Hub id or a folder.")
        return str(TINY_LM)
    for short, hub_id in HUB_IDS.items():
        if name in (short, hub_id):
            folder = MODELS_FOLDER / short
            return str(folder) if (folder / "config.json").is_file() else hub_id
    close = [] if "/" in name else similar(name.lower(), ["tiny-lm", *HUB_IDS])
    if close:
        raise ValueError(f"{name!r} is neither a folder nor a known model; did you mean {close[0]!r}?")
    return name


def _is_path(name: str) -> bool:
    """Returns whether a name can only be a path: Hub ids have at most one slash, between owner and name."""
    return (
        name.startswith((".", "~"))
        or Path(name).is_absolute()
        or "\\" in name
        or name.count("/") > 1
        or name[-1:] == "/"
    )


def missing(name: str) -> str:
    """Returns the beginning of the error for a name that may have been meant as a folder, or an empty string."""
    owner, slash, _ = name.partition("/")
    if Path(name).is_dir():
        return ""
    return f"there is no folder {name!r} here, and on the Hub: " if slash and Path(owner).is_dir() else ""


def load_config(name: str) -> tuple[Any, Any]:
    """Loads configuration and tokenizer, which suffice to make documents before the weights are loaded.

    Args:
        name: Hub id, folder or short name.

    Raises:
        EvaluationError: configuration or tokenizer cannot be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _loading(name):
        path = resolve_model(name)
        return AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def load_model(
    name: str, dtype: str = "auto", device: str | None = None, quiet: bool = False, weights: str | None = None
) -> Any:
    """Loads a model, ready to run.

    Args:
        name: Hub id, folder or short name.
        dtype: "auto" or the name of a PyTorch dtype.
        device: device of the model; None uses a GPU if there is one.
        weights: one of `WEIGHTS`, or None for the weights as saved.

    Raises:
        EvaluationError: the model cannot be loaded, or the device cannot be used.
    """
    import torch

    hide_progress_bars(quiet)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvaluationError(f"device {device} cannot be used: {str(error).splitlines()[0]}") from error
    with _loading(name):
        return model_from(
            resolve_model(name), dtype, device or ("cuda" if torch.cuda.is_available() else "cpu"), weights
        )


def model_from(path: str, dtype: str, device: str, weights: str | None = None) -> Any:
    """Calls `from_pretrained` and moves the model to the device.

    Args:
        path: folder or Hub id.
        dtype: "auto" or the name of a PyTorch dtype.
        weights: one of `WEIGHTS`, to which bitsandbytes quantises the weights as they are loaded; None keeps them. With
            "4bit", a large output head on a CPU gets 4 bits as well (output_head.py).

    Raises:
        ValueError: the weights are already quantised.
        ImportError: bitsandbytes is missing.
        OSError: a file of the weights is missing or damaged.
    """
    import torch
    from transformers import AutoConfig

    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    if weights is None:
        return _from_pretrained(path, dtype=chosen).to(device).eval()
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"weights={weights!r} needs bitsandbytes: pip install bitsandbytes")
    config = AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"its weights are already quantised; leave weights={weights!r} out.")
    from .bitsandbytes_weights import quantization_config, settle

    kept = config.get_text_config().dtype or torch.float32
    bits = quantization_config(weights, kept if chosen == "auto" else chosen, device)
    model = _from_pretrained(path, dtype=chosen, quantization_config=bits, device_map={"": device}).eval()
    settle(model)
    return model


def _from_pretrained(path: str, **options: Any) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, **options)
    except SafetensorError as error:
        raise OSError(
            f"a file of the weights in {path} is damaged or truncated ({error}); download it again."
        ) from error


def hide_progress_bars(quiet: bool) -> None:
    """Hides Transformers' progress bars if `quiet`, or if stderr is not a terminal."""
    from transformers.utils import logging

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise EvaluationError(f"cannot load the model {name}: {missing(name)}{one_line(error)}") from error
