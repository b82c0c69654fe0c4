"""Line plots of measurements against context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from hf_diffkv.plot.figure import SIZE, SMALL, Picture, new_figure, styled
from hf_diffkv.plot.palette import EDGE, order_of, styles_of

# (tokens, value) pairs by the name of a cache
Curves = Mapping[str, Sequence[tuple[float, float]]]
# sizes in inches: one panel, several side by side, a row, and the legend
PANEL_WIDTH, PANELS_WIDTH, ROW_SIZE, LEGEND = 6.5, 9.0, 2.6, 0.25
PANEL_COLUMNS, LEGEND_COLUMNS = 3, 4
TOKENS_LABEL = "tokens of context"


def memory(curves: Curves | Mapping[str, Curves], title: str = "") -> Picture:
    """Plots bytes held against tokens, with one curve per cache.

    Args:
        curves: (tokens, bytes) pairs by the name of a cache, or a mapping of panel titles to such mappings.
        title: title of a single panel.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    panels = _panels(curves, title)
    most = max((value for members in panels.values() for points in members.values() for _, value in points), default=0)
    size, unit = (1e9, "GB") if most >= 1e9 else (1e6, "MB")
    scaled = {
        name: {cache: [(tokens, value / size) for tokens, value in points] for cache, points in members.items()}
        for name, members in panels.items()
    }
    return _drawn(scaled, f"{unit} held")


def speed(curves: Curves | Mapping[str, Curves], title: str = "") -> Picture:
    """Plots milliseconds per generated token against context; arguments and errors as for `memory`."""
    return _drawn(_panels(curves, title), "ms per token")


def curves(
    curves: Curves | Mapping[str, Curves],
    ylabel: str,
    *,
    title: str = "",
    xlabel: str = TOKENS_LABEL,
    level: float | None = None,
    columns: int = PANEL_COLUMNS,
    **axis: Any,
) -> Picture:
    """Plots any quantity against context; arguments and errors as for `memory`.

    Args:
        ylabel: label of the vertical axis.
        xlabel: label of the horizontal axis.
        level: height of a horizontal line; None draws none.
        columns: number of panels side by side.
        **axis: arguments of Matplotlib's `Axes.set`.
    """
    return _drawn(_panels(curves, title), ylabel, xlabel, level, columns, **axis)


def _panels(curves: Curves | Mapping[str, Curves], title: str) -> Mapping[str, Curves]:
    if not isinstance(curves, Mapping):
        raise ValueError(f"curves is a {type(curves).__name__}; give (tokens, value) pairs by the name of a cache.")
    several = all(isinstance(value, Mapping) for value in curves.values())
    panels = cast("Mapping[str, Curves]", curves if several else {title: curves})
    if not any(points for members in panels.values() for points in members.values()):
        raise ValueError("curves is empty; give (tokens, value) by the name of a cache.")
    return panels


def _drawn(
    panels: Mapping[str, Curves],
    ylabel: str,
    xlabel: str = TOKENS_LABEL,
    level: float | None = None,
    columns: int = PANEL_COLUMNS,
    **settings: Any,
) -> Picture:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    styles = styles_of(sorted({name for members in panels.values() for name in members}, key=order_of))
    width = PANEL_WIDTH if columns == 1 else PANELS_WIDTH
    figure = new_figure(width, (ROW_SIZE + (columns == 1)) * rows + LEGEND * -(-len(styles) // LEGEND_COLUMNS) + 0.1)
    handles = {}
    for index, (title, members) in enumerate(panels.items()):
        axis = styled(figure.add_subplot(rows, columns, index + 1), title, xlabel)
        if index % columns == 0:
            axis.set_ylabel(ylabel, fontsize=SIZE)
        if level is not None:
            axis.axhline(level, color=EDGE, linewidth=1)
        for name, points in sorted(members.items(), key=lambda item: order_of(item[0])):
            style = styles[name]
            (handles[name],) = axis.plot(
                *zip(*sorted(points)),
                color=style.colour,
                marker=style.mark,
                linestyle=style.dash,
                markersize=5,
                label=name,
            )
        axis.set(**{"ylim": (0, None), "xlim": (0, None), **settings})
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:,.4g}")
        axis.xaxis.set_major_locator(_locator(settings, 4 if columns > 1 else 8))
    shown = {name: handles[name] for name in styles if name in handles}
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncol=LEGEND_COLUMNS,
        frameon=False,
        fontsize=SMALL,
        handlelength=3,
    )
    return Picture(figure)


def _locator(settings: dict[str, Any], most: int) -> Any:
    from matplotlib.ticker import LogLocator, MaxNLocator

    return LogLocator(subs=(1, 2, 5)) if settings.get("xscale") == "log" else MaxNLocator(most, steps=(1, 2, 5, 10))
