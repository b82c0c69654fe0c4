"""Pictures in one palette; they need matplotlib (extra `plot`), the text in HTML does not.

What a function here returns is shown by notebooks, and `save(path)` writes it. Matplotlib is imported by what draws.
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
