"""Plots of caches and measurements in one palette.

The plots need matplotlib (extra `plot`), which is imported when something is drawn; coloured text as HTML does not need
it. Notebooks display the objects that these functions return, and `save(path)` writes them to a file.
"""

from typing import Any

from ..extras import beside
from .coloured_text import ColouredText, text
from .figure import Picture
from .lines import curves, loss, memory, speed
from .overview import levels, precisions

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
_BESIDE = {name: ("hf_diffkv_evaluation.scatter", "evaluation") for name in ("Point", "quality")}


def __getattr__(name: str) -> Any:
    """Imports a name of `_BESIDE`. Raises `ImportError` with the command that installs it."""
    if name not in _BESIDE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(beside(*_BESIDE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_BESIDE})
