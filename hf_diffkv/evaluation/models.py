"""Short names of models to evaluate on, their ids on the Hub, and their copies in this checkout."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TINY_LM = CHECKOUT / "examples" / "models" / "tiny-lm"
# where `make models` puts what it fetches, a folder per short name
MODELS_FOLDER = CHECKOUT / "build" / "models"
HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "gemma3-270m": "google/gemma-3-270m"}
# enough for a quick look; tiny-lm is not in wheels
SMALLEST_MODEL = "tiny-lm" if (TINY_LM / "config.json").is_file() else "smollm2"


def resolve_model(name: str) -> str:
    """What `from_pretrained` is to be given for `name`. Nothing is loaded and no network asked.

    A folder that exists is returned as it is. A short name, or the Hub id that it stands for, is the copy that
    `make models` made, and the Hub id where there is none; "tiny-lm" is the model that comes with the checkout.
    Anything else is returned as it is.

    Raises:
        ValueError: a name that is no Hub id with an owner and looks like a misspelt short name, or "tiny-lm" outside a
            checkout.
    """
    if Path(name).is_dir():
        return name
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
