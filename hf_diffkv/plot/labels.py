"""Names beside the marks of a picture, none on another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .palette import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

# offsets from the mark in points, near ones first
NEAR = [(7, 0, "left"), (7, 8, "left"), (7, -8, "left"), (-7, 0, "right"), (-7, 8, "right"), (-7, -8, "right")]
FAR = [(side * x, y, name) for x in (14, 32) for y in range(-91, 92, 13) for side, name in ((1, "left"), (-1, "right"))]
FAR.sort(key=lambda offset: abs(offset[0]) + abs(offset[1]))
# a mark's half width in points, and beyond which distance a line leads to it
MARK_POINTS, LEADS = 5, 10
# worse than to cover anything
OUTSIDE = 1e6


def place(axis: Axes, marks: Sequence[tuple[float, float, str, str]], fontsize: float) -> None:
    """Writes the name of each mark where it covers least.

    Args:
        marks: x, y, name and colour.
    """
    figure: Any = axis.figure
    figure.draw_without_rendering()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axis.get_window_extent(renderer)
    centres = axis.transData.transform([(x, y) for x, y, _, _ in marks])
    taken = [_around(x, y, MARK_POINTS * scale) for x, y in centres]
    for (x, y, name, colour), centre in sorted(zip(marks, centres), key=lambda pair: -pair[1][1]):
        size = _size(axis, name, fontsize, renderer)
        costs = []
        for order, offset in enumerate(NEAR + FAR):
            box = _beside(centre, offset, size, scale)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            costs.append((sum(_shared(box, other) for other in taken) + OUTSIDE * outside, order, box))
        _, order, box = min(costs, key=lambda cost: cost[:2])
        taken.append(box)
        right, up, side = (NEAR + FAR)[order]
        # a line ends at the side of the name that is towards its mark
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        line["relpos"] = (0.0 if side == "left" else 1.0, 0.5)
        axis.annotate(
            name,
            (x, y),
            (right, up),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=fontsize,
            color=INK,
            arrowprops=line if max(abs(right), abs(up)) > LEADS else None,
            in_layout=False,
            annotation_clip=False,
        )


def _size(axis: Axes, name: str, fontsize: float, renderer: Any) -> Bbox:
    text = axis.text(0, 0, name, fontsize=fontsize)
    size = text.get_window_extent(renderer)
    text.remove()
    return size


def _around(x: float, y: float, half: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _beside(centre: Sequence[float], offset: tuple[float, float, str], size: Bbox, scale: float) -> Bbox:
    """Where a text of this size lies at such an offset from `centre`, in pixels."""
    from matplotlib.transforms import Bbox

    right, up, side = offset
    left = centre[0] + right * scale - (size.width if side == "right" else 0)
    return Bbox.from_bounds(left, centre[1] + up * scale - size.height / 2, size.width, size.height)


def _shared(box: Bbox, other: Bbox) -> float:
    """Area that both cover."""
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)
