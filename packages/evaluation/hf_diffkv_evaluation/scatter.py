"""Scatter plots of quality against bytes, with names that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_diffkv.plot.figure import SMALL, Picture, new_figure, styled
from hf_diffkv.plot.palette import INK, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

# inches
SCATTER_WIDTH, SCATTER_HEIGHT = 8.0, 5.4
# a logarithmic scale is linear below this, down to 0
LINEAR = 1e-3
# offsets of a name from its mark in points, nearest first
NEAR = [(7, 0, "left"), (7, 8, "left"), (7, -8, "left"), (-7, 0, "right"), (-7, 8, "right"), (-7, -8, "right")]
FAR = [(side * x, y, name) for x in (14, 32) for y in range(-91, 92, 13) for side, name in ((1, "left"), (-1, "right"))]
OFFSETS = NEAR + sorted(FAR, key=lambda offset: abs(offset[0]) + abs(offset[1]))
# half of a mark's width in points, and distance beyond which a line connects a name with its mark
MARK_POINTS, LEADS = 5, 10
# cost of leaving the frame, higher than that of any overlap
OUTSIDE = 1e6


@dataclass(frozen=True)
class Point:
    """Result of one method.

    Attributes:
        name: name of the method.
        ratio: bytes as a share of the dense cache's.
        value: measured value.
        low, high: bounds of the value's interval.
    """

    name: str
    ratio: float
    value: float
    low: float
    high: float


def quality(points: Sequence[Point], title: str, ylabel: str, logarithmic: bool = False) -> Picture:
    """Plots quality against the share of the dense cache's bytes, one named mark with its interval per method.

    Args:
        points: results of the methods.
        title: title of the plot.
        ylabel: label of the vertical axis, which should say whether higher is better.
        logarithmic: whether the vertical axis is logarithmic; it is linear below `LINEAR`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("points is empty; there is nothing to draw.")
    figure = new_figure(SCATTER_WIDTH, SCATTER_HEIGHT)
    axis = styled(figure.add_subplot(), title, "real bytes, % of the dense cache", ylabel)
    for point in points:
        style, bounds = style_of(point.name), (max(point.value - point.low, 0), max(point.high - point.value, 0))
        axis.errorbar(
            100 * point.ratio,
            point.value,
            yerr=[[bound] for bound in bounds],
            fmt=style.mark,
            color=style.colour,
            markersize=7,
            capsize=2,
            elinewidth=0.7,
            clip_on=False,
        )
    if logarithmic:
        axis.set_yscale("symlog", linthresh=LINEAR)
        axis.set_ylim(bottom=0)
    axis.margins(x=0.06, y=0.08)
    _place_names(axis, points)
    return Picture(figure)


def _place_names(axis: Axes, points: Sequence[Point]) -> None:
    """Writes each name next to its mark, where it overlaps least."""
    from matplotlib.transforms import Bbox

    figure: Any = axis.figure
    figure.draw_without_rendering()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axis.get_window_extent(renderer)
    places = [(100 * point.ratio, point.value) for point in points]
    centres = axis.transData.transform(places)
    half = MARK_POINTS * scale
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in centres]
    for point, at, centre in sorted(zip(points, places, centres), key=lambda mark: -mark[2][1]):
        text = axis.text(0, 0, point.name, fontsize=SMALL)
        size = text.get_window_extent(renderer)
        text.remove()
        costs = []
        for order, offset in enumerate(OFFSETS):
            box = _beside(centre, offset, size, scale)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            costs.append((sum(_shared(box, other) for other in taken) + OUTSIDE * outside, order, box))
        _, order, box = min(costs, key=lambda cost: cost[:2])
        taken.append(box)
        right, up, side = OFFSETS[order]
        # the line ends at the side of the name that faces its mark
        line = {"arrowstyle": "-", "color": style_of(point.name).colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        line["relpos"] = (0.0 if side == "left" else 1.0, 0.5)
        axis.annotate(
            point.name,
            at,
            (right, up),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=SMALL,
            color=INK,
            arrowprops=line if max(abs(right), abs(up)) > LEADS else None,
            in_layout=False,
            annotation_clip=False,
        )


def _beside(centre: Sequence[float], offset: tuple[float, float, str], size: Bbox, scale: float) -> Bbox:
    """Returns the box of a text of this size at `offset` (in points) from `centre`, in pixels."""
    from matplotlib.transforms import Bbox

    right, up, side = offset
    left = centre[0] + right * scale - (size.width if side == "right" else 0)
    return Bbox.from_bounds(left, centre[1] + up * scale - size.height / 2, size.width, size.height)


def _shared(box: Bbox, other: Bbox) -> float:
    """Returns the area of the boxes' overlap."""
    both = box.intersection(box, other)
    return both.width * both.height if both else 0.0
