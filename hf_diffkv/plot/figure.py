"""What all pictures have in common: how they are made, shown and saved."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import install
from .palette import EDGE, GRID, INK, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
SIZE, SMALL, LARGE = 9.0, 8.0, 11.0


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture, which notebooks show.

    Attributes:
        figure: Matplotlib's, for changes before it is saved.
    """

    figure: Figure

    def save(self, path: str | os.PathLike) -> Path:
        """Writes it in the format that the name ends in: png, svg, pdf.

        Raises:
            OSError: it cannot be written.
            ValueError: no such format.
        """
        path = Path(path)
        self.figure.savefig(path, dpi=DPI)
        return path

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=DPI)
        return data.getvalue()


def new_figure(width: float, height: float, **layout: Any) -> Figure:
    """A white figure of so many inches, of no window and no other state of Matplotlib's.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install('plot')}") from error
    figure = Figure(figsize=(width, height), facecolor=PAPER, **{"layout": "constrained", **layout})
    FigureCanvasAgg(figure)
    return figure


def styled(axis: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> Axes:
    """`axis` with light lines and labels in one size."""
    axis.set_title(title, fontsize=SIZE + 1, color=INK)
    axis.set_xlabel(xlabel, fontsize=SIZE, color=INK)
    axis.set_ylabel(ylabel, fontsize=SIZE, color=INK)
    axis.tick_params(labelsize=SMALL, color=EDGE, labelcolor=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(EDGE)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    return axis
