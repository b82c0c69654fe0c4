"""Creation, display and saving of pictures."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..extras import install
from ..replacing import replacing
from .palette import EDGE, GRID, INK, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
SIZE, SMALL, LARGE = 9.0, 8.0, 11.0


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture, which notebooks display.

    Attributes:
        figure: Matplotlib figure, which can be changed before it is saved.
    """

    figure: Figure

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the picture in the format given by the file extension: png, svg or pdf, or png if there is none.

        Raises:
            OSError: the file cannot be written.
            ValueError: the format is unknown.
        """
        path = Path(path)
        with replacing(path) as new:
            self.figure.savefig(new, dpi=DPI, format=path.suffix[1:] or "png")
        return path

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=DPI)
        return data.getvalue()


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Creates a white figure of `width` by `height` inches, independent of Matplotlib's windows and global state.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install('plot')}") from error
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def styled(axis: Axes, title: str = "", xlabel: str = "", ylabel: str = "") -> Axes:
    """Applies the project's style to `axis` and returns it."""
    axis.set_title(title, fontsize=SIZE + 1, color=INK)
    axis.set_xlabel(xlabel, fontsize=SIZE, color=INK)
    axis.set_ylabel(ylabel, fontsize=SIZE, color=INK)
    axis.tick_params(labelsize=SMALL, color=EDGE, labelcolor=INK)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(EDGE)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    return axis
