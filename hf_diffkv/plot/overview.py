"""Overviews of a cache by layer and KV head: shares of the levels, or precisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .figure import LARGE, SIZE, SMALL, Picture, new_figure
from .palette import EDGE, INK, LEVELS, PAPER, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..cache.diffkv_cache import DiffKVCache
    from ..cache.report import LayerReport, MemoryReport

# sizes in inches: minimum and maximum height of a row of heads, total height of many rows, and the picture's width
ROW_HEIGHTS, ROWS_HEIGHT = (0.05, 0.3), 8.0
OVERVIEW_WIDTH = 8.0
# height of a head's row and maximum height of all, where layers are columns
HEAD_HEIGHT, HEADS_HEIGHT = 0.35, 4.0
# share of its cell that a head's bar fills, in width and height
FILLED = (0.94, 0.8)
TICKS = 16
# left, top, width and height
Box = tuple[float, float, float, float]


def levels(cache: DiffKVCache | MemoryReport, title: str | None = None) -> Picture:
    """Plots the shares of high, low, window and pruned tokens, one row per compressed layer and one bar per KV head.

    All bars have the same size, so the area of a colour is that level's share of all tokens.

    Args:
        cache: cache, or the report that its `memory()` returned.
        title: title; None shows the cache's size relative to a dense cache.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `cache` is neither, or holds nothing yet.
    """
    report = _report_of(cache)
    rows, columns = len(report.layers), max(len(layer.high) for layer in report.layers)
    height = rows * min(max(ROWS_HEIGHT / rows, ROW_HEIGHTS[0]), ROW_HEIGHTS[1])
    figure = new_figure(OVERVIEW_WIDTH, height + 1.5)
    axis = figure.add_subplot()
    bars = [bar for row, layer in enumerate(report.layers) for bar in _bars(row, layer)]
    _draw(axis, bars, LEVELS, linewidth=0)
    _label_cells(axis.xaxis, "KV head: share of the tokens it has seen", list(range(columns)))
    _label_cells(axis.yaxis, "layer", [layer.layer_idx for layer in report.layers])
    return _finished(figure, title or _title(report), LEVELS, len(LEVELS))


def precisions(cache: DiffKVCache | MemoryReport, title: str | None = None) -> Picture:
    """Plots the precision of each head, one column per compressed layer and one cell per KV head; darker means more.

    Arguments and errors are as for `levels`.
    """
    report = _report_of(cache)
    rows = max(len(layer.precisions) for layer in report.layers)
    colours = precision_colours(report)
    figure = new_figure(OVERVIEW_WIDTH, min(HEADS_HEIGHT, rows * HEAD_HEIGHT) + 1.5)
    axis = figure.add_subplot()
    cells = [
        (name, (column, row, 1.0, 1.0))
        for column, layer in enumerate(report.layers)
        for row, name in enumerate(layer.precisions)
    ]
    _draw(axis, cells, colours, edgecolor=PAPER, linewidth=0.5)
    _label_cells(axis.xaxis, "layer", [layer.layer_idx for layer in report.layers])
    _label_cells(axis.yaxis, "KV head", list(range(rows)))
    title = title or f"Bits of every head: {report.ratio:.1%} of a dense cache"
    return _finished(figure, title, colours, min(6, len(colours)))


def precision_colours(report: MemoryReport) -> dict[str, str]:
    """Returns the colours of the heads' precisions by name, from few bits (light) to many (dark)."""
    names = sorted({name for layer in report.layers for name in layer.precisions}, key=_bits)
    return dict(zip(names, shades(len(names))))


def _bits(name: str) -> tuple[int, str]:
    """Returns a sort key: the bits of a key and a value element together, of the first precision if there are two."""
    from ..precision import Precision

    precision = Precision.parse(name.partition("/K")[0])
    return precision.k_bits + precision.v_bits, name


def _report_of(cache: DiffKVCache | MemoryReport) -> MemoryReport:
    """Returns the memory report of `cache`; raises `ValueError` for other objects and for empty caches."""
    report = cache.memory() if hasattr(cache, "memory") else cache
    if not hasattr(report, "num_layers"):
        raise ValueError(f"cache is a {type(cache).__name__}; pass a DiffKVCache, or the result of its memory().")
    if not report.layers:
        raise ValueError("the cache holds nothing yet; generate with it first.")
    return report


def _title(report: MemoryReport) -> str:
    whole = f"{report.bytes / 1e6:,.2f} MB held, {report.ratio:.1%} of a dense cache"
    if len(report.layers) == report.num_layers:
        return whole
    return f"{whole}\n{len(report.layers)} of {report.num_layers} layers compressed, to {report.compressed_ratio:.1%}"


def _bars(row: int, layer: LayerReport) -> list[tuple[str, Box]]:
    """Returns the level and box of each part of a layer's bars; a cell is one unit wide and one high."""
    bars = []
    for head, counts in enumerate(zip(*(getattr(layer, name) for name in LEVELS))):
        left, scale = head + (1 - FILLED[0]) / 2, FILLED[0] / max(1, sum(counts))
        for name, count in zip(LEVELS, counts):
            if count:
                bars.append((name, (left, row + (1 - FILLED[1]) / 2, count * scale, FILLED[1])))
            left += count * scale
    return bars


def _draw(axis: Axes, boxes: Sequence[tuple[str, Box]], colours: dict[str, str], **edges: Any) -> None:
    """Draws the boxes as one collection per name, because thousands of patches take seconds."""
    from matplotlib.collections import PolyCollection

    for name, colour in colours.items():
        corners = [
            ((left, top), (left + width, top), (left + width, top + height), (left, top + height))
            for each, (left, top, width, height) in boxes
            if each == name
        ]
        axis.add_collection(PolyCollection(corners, facecolor=colour, label=name, **edges))


def _label_cells(axis: Any, label: str, names: list[int]) -> None:
    """Labels the middle of cells along an axis, left to right or top to bottom, as many as there is room for."""
    step = -(-len(names) // TICKS)
    axis.set_ticks([i + 0.5 for i in range(0, len(names), step)], [str(name) for name in names[::step]])
    axis.set_tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    axis.set_label_text(label, fontsize=SIZE, color=INK)
    first, last = (0, len(names)) if axis.axis_name == "x" else (len(names), 0)
    axis.axes.set(**{f"{axis.axis_name}lim": (first, last)})


def _finished(figure: Any, title: str, colours: dict[str, str], columns: int) -> Picture:
    """Adds a title above and a legend of the colours below, in `columns` columns."""
    from matplotlib.patches import Patch

    figure.axes[0].spines[:].set_visible(False)
    figure.suptitle(title, fontsize=LARGE, color=INK)
    handles = [Patch(facecolor=colour, edgecolor=EDGE, linewidth=0.5, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncol=columns, frameon=False, fontsize=SIZE)
    return Picture(figure)
