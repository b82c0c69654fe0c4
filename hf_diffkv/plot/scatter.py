"""Quality against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .figure import SMALL, Picture, new_figure, styled
from .labels import place
from .palette import style_of

SCATTER_WIDTH, SCATTER_HEIGHT = 8.0, 5.4
# below this a logarithmic scale goes on as a linear one, down to 0
LINEAR = 1e-3


@dataclass(frozen=True)
class Point:
    """What one method reaches.

    Attributes:
        ratio: of the dense cache's bytes.
        value, low, high: its figure, and the bounds of its interval.
    """

    name: str
    ratio: float
    value: float
    low: float
    high: float


def quality(points: Sequence[Point], title: str, ylabel: str, logarithmic: bool = False) -> Picture:
    """A mark for each method, with its interval and name: how good it is at which share of the dense cache's bytes.

    Args:
        ylabel: what the figures are, and which of them are better.
        logarithmic: the scale of figures, but for the smallest.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no points.
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
    place(axis, [(100 * point.ratio, point.value, point.name, style_of(point.name).colour) for point in points], SMALL)
    return Picture(figure)
