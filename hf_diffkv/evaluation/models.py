"""Short names of models, their ids on the Hub, their copies in this checkout, and how all of them are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import EvaluationError, one_line

CHECKOUT = Path(__file__).resolve().parents[2]
TINY_LM = CHECKOUT / "examples" / "models" / "tiny-lm"
# where `make models` puts what it fetches, a folder per short name
MODELS_FOLDER = CHECKOUT / "build" / "models"
HUB_IDS = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "gemma3-270m": "google/gemma-3-270m",
    "qwen2.5-coder-0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
}
# enough for a quick look; tiny-lm is not in wheels
SMALLEST_MODEL = "tiny-lm" if (TINY_LM / "config.json").is_file() else "smollm2"


def resolve_model(name: str) -> str:
    """What `from_pretrained` is to be given for `name`. Nothing is loaded and no network asked.

    A folder that exists is returned as it is. A short name, or the Hub id that it stands for, is the copy that
    `make models` made, and the Hub id where there is none; "tiny-lm" is the model that comes with the checkout.
    Anything else is returned as it is.

    Raises:
        ValueError: the path of a folder that does not exist, a name that is no Hub id with an owner and looks like a
            misspelt short name, or "tiny-lm" outside a checkout.
    """
    if Path(name).is_dir():
        return name
    if _is_path(name):
        raise ValueError(f"there is no folder {name!r}.")
    if name == "tiny-lm":
        if not (TINY_LM / "config.json").is_file():
            raise ValueError("tiny-lm comes with a checkout of the project only; give smollm2, a Hub id or a folder.")
        return str(TINY_LM)
    for short, hub_id in HUB_IDS.items():
        if name in (short, hub_id):
            folder = MODELS_FOLDER / short
            return str(folder) if (folder / "config.json").is_file() else hub_id
    close = [] if "/" in name else get_close_matches(name.lower(), ["tiny-lm", *HUB_IDS], n=1)
    if close:
        raise ValueError(f"{name!r} is neither a folder nor a known model; did you mean {close[0]!r}?")
    return name


def _is_path(name: str) -> bool:
    """Whether a name can only mean a file or a folder: Hub ids have at most one slash, between owner and name."""
    return (
        name.startswith((".", "~"))
        or Path(name).is_absolute()
        or "\\" in name
        or name.count("/") > 1
        or name[-1:] == "/"
    )


def missing(name: str) -> str:
    """What to say first where `name` could not be loaded and may have been meant as a folder; empty where not."""
    owner, slash, _ = name.partition("/")
    if Path(name).is_dir():
        return ""
    return f"there is no folder {name!r} here, and on the Hub: " if slash and Path(owner).is_dir() else ""


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
        raise EvaluationError(f"cannot load the model {name}: {missing(name)}{one_line(error)}") from error
