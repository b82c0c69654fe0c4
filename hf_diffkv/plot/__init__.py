"""Plots of caches and measurements in one palette.

The plots need matplotlib (extra `plot`), which is imported when something is drawn; coloured text as HTML does not need
it. Notebooks display the objects that these functions return, and `save(path)` writes them to a file.
"""

from .coloured_text import ColouredText, text
from .figure import Picture
from .lines import curves, loss, memory, speed
from .overview import levels, precisions
from .scatter import Point, by_layer, quality

__all__ = [
    "ColouredText",
    "Picture",
    "Point",
    "by_layer",
    "curves",
    "levels",
    "loss",
    "memory",
    "precisions",
    "quality",
    "speed",
    "text",
]
