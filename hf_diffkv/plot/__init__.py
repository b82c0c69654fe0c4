"""Plots of caches and measurements, with a shared palette.

The plots need matplotlib (extra `plot`), which is imported when something is drawn. Coloured text and the plots of
measurements are in other distributions (`packages/demo`, `packages/evaluation`). Notebooks display the objects that
these functions return, and `save(path)` writes them to a file.
"""

from typing import Any

from ..extras import import_extra
from .figure import Picture
from .overview import levels, precisions
from .predicted import loss

__all__ = [
    "ColouredText",
    "Picture",
    "Point",
    "curves",
    "levels",
    "loss",
    "memory",
    "precisions",
    "quality",
    "speed",
    "text",
]

# names of other distributions: module, and the extra that installs it
_EXTRA_NAMES = {
    **dict.fromkeys(("ColouredText", "text"), ("hf_diffkv_demo.coloured_text", "demo")),
    **dict.fromkeys(("Point", "quality"), ("hf_diffkv_evaluation.scatter", "evaluation")),
    **dict.fromkeys(("curves", "memory", "speed"), ("hf_diffkv_evaluation.lines", "evaluation")),
}


def __getattr__(name: str) -> Any:
    """Imports a name of `_EXTRA_NAMES`. Raises `ImportError` with the command that installs it."""
    if name not in _EXTRA_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_extra(*_EXTRA_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXTRA_NAMES})
