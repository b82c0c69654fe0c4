"""The precision of every layer and KV head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .figure import Picture, new_figure
from .overview import finished, label_cells, report_of
from .palette import PAPER, shades

if TYPE_CHECKING:
    from ..cache.diffkv_cache import DiffKVCache
    from ..cache.report import MemoryReport

# inches: of the picture's width, of a head's row at most, and of all rows where they are many
PRECISIONS_WIDTH, HEAD_HEIGHT, HEADS_HEIGHT = 8.0, 0.35, 4.0


def precisions(cache: DiffKVCache | MemoryReport, title: str | None = None) -> Picture:
    """A column for each compressed layer, in it a cell for each KV head, the darker the more bits its tokens have.

    Args:
        cache: a cache, or what its `memory()` said.
        title: None: what the cache takes of a dense one's bytes.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no cache, or one that holds nothing yet.
    """
    report = report_of(cache)
    rows = max(len(layer.precisions) for layer in report.layers)
    colours = precision_colours(report)
    figure = new_figure(PRECISIONS_WIDTH, min(HEADS_HEIGHT, rows * HEAD_HEIGHT) + 1.5)
    axis = figure.add_subplot()
    _draw(axis, [(column, layer.precisions) for column, layer in enumerate(report.layers)], colours)
    label_cells(axis.xaxis, "layer", [layer.layer_idx for layer in report.layers])
    label_cells(axis.yaxis, "KV head", list(range(rows)))
    title = title or f"Bits of every head: {report.ratio:.1%} of a dense cache"
    return finished(figure, title, colours, min(6, len(colours)))


def precision_colours(report: MemoryReport) -> dict[str, str]:
    """Colours of the precisions that heads have, the darker the more bits; those of few bits come first."""
    names = sorted({name for layer in report.layers for name in layer.precisions}, key=_bits)
    return dict(zip(names, shades(len(names))))


def _bits(name: str) -> tuple[int, str]:
    """Of a key and a value element together, for the order; of two precisions the first."""
    from ..precision import Precision

    precision = Precision.parse(name.partition("/K")[0])
    return precision.k_bits + precision.v_bits, name


def _draw(axis: Any, layers: list[tuple[int, tuple[str, ...]]], colours: dict[str, str]) -> None:
    """One collection for each precision, as thousands of patches take seconds."""
    from matplotlib.collections import PolyCollection

    for name, colour in colours.items():
        corners = [
            ((column, row), (column + 1, row), (column + 1, row + 1), (column, row + 1))
            for column, names in layers
            for row, each in enumerate(names)
            if each == name
        ]
        axis.add_collection(PolyCollection(corners, facecolor=colour, edgecolor=PAPER, linewidth=0.5, label=name))
