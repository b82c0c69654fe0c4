"""A figure of every head, by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .figure import SMALL, Picture, new_figure, styled
from .palette import GROUPS

BARS_WIDTH, BARS_HEIGHT = 7.5, 3.8


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
    figure = new_figure(BARS_WIDTH, BARS_HEIGHT)
    axis = styled(figure.add_subplot(), "", "layer", ylabel)
    for (name, points), style in zip(groups.items(), GROUPS):
        layers, values = zip(*points)
        axis.scatter(layers, values, s=14, alpha=0.7, linewidth=0, color=style.colour, marker=style.mark, label=name)
    axis.set(yscale="log") if logarithmic else axis.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncol=len(groups), frameon=False, fontsize=SMALL)
    return Picture(figure)
