"""Marks: quality against bytes, and a figure of every head by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .figure import SMALL, Picture, new_figure, styled
from .labels import place
from .palette import GROUPS, style_of

# inches
SCATTER_WIDTH, SCATTER_HEIGHT = 8.0, 5.4
LAYERS_WIDTH, LAYERS_HEIGHT = 7.5, 3.8
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


def by_layer(groups: Mapping[str, Sequence[tuple[int, float]]], ylabel: str, logarithmic: bool = False) -> Picture:
    """A mark for each head over its layer.

    Args:
        groups: (layer, value) of each head, by the name of what was measured.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no groups, or more than there are colours for.
    """
    if not 0 < len(groups) <= len(GROUPS):
        raise ValueError(f"groups has {len(groups)} entries; give 1 to {len(GROUPS)}.")
    figure = new_figure(LAYERS_WIDTH, LAYERS_HEIGHT)
    axis = styled(figure.add_subplot(), "", "layer", ylabel)
    for (name, points), style in zip(groups.items(), GROUPS):
        layers, values = zip(*points)
        axis.scatter(layers, values, s=14, alpha=0.7, linewidth=0, color=style.colour, marker=style.mark, label=name)
    axis.set(yscale="log") if logarithmic else axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncol=len(groups), frameon=False, fontsize=SMALL)
    return Picture(figure)
