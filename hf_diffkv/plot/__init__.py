"""Pictures in one palette; they need matplotlib (`pip install "hf-diffkv[plot]"`), the text in HTML does not.

What a function here returns is shown by notebooks, and `save(path)` writes it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coloured_text import ColouredText, text
    from .figure import Picture
    from .layers import by_layer
    from .lines import curves, memory, speed
    from .overview import levels
    from .scatter import Point, quality

__all__ = ["ColouredText", "Picture", "Point", "by_layer", "curves", "levels", "memory", "quality", "speed", "text"]

# loaded on first use: commands that draw nothing take the palette alone
_LAZY = {
    "ColouredText": "coloured_text",
    "Picture": "figure",
    "Point": "scatter",
    "by_layer": "layers",
    "curves": "lines",
    "levels": "overview",
    "memory": "lines",
    "quality": "scatter",
    "speed": "lines",
    "text": "coloured_text",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
