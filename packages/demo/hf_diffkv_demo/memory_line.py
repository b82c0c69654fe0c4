"""HTML for the bytes that both caches held, against the tokens in them, up to the current point."""

from __future__ import annotations

import math
from html import escape

from hf_diffkv.plot.palette import style_of
from hf_diffkv.running.side_by_side import DIFFKV, DYNAMIC

from .generation import CacheRun

# the dense one has the text's colour, on light and dark pages
COLOURS = {DYNAMIC: "currentColor", DIFFKV: style_of(DIFFKV).colour}
# points of a line; more would not be visible
MOST_POINTS = 200
# units of the drawing, which is stretched to fit
WIDTH, HEIGHT = 1000.0, 100.0


def memory_line(dense: CacheRun, compressed: CacheRun, last_token: int) -> str:
    """Draws two lines on one scale, and above them the bytes that both caches hold now.

    Args:
        last_token: end of the token axis.

    If the compressed cache has a budget, a dashed line is drawn there.
    """
    runs, budget = {DYNAMIC: dense, DIFFKV: compressed}, compressed.max_bytes
    top = _top(max(*(_at_the_end(run, last_token) for run in runs.values()), min(budget or 0, _most(dense))))
    lines = "".join(
        f'<polyline data-cache="{name}" points="{_points(run, last_token, top)}" stroke="{COLOURS[name]}"/>'
        for name, run in runs.items()
    )
    grid = "".join(f'<line x1="0" x2="{WIDTH:g}" y1="{y:g}" y2="{y:g}"/>' for y in (0, HEIGHT / 2, HEIGHT))
    legend = "".join(
        f'<span><i style="background:{COLOURS[name]}"></i>{name} <b>{_megabytes(run)}</b></span>'
        for name, run in runs.items()
    )
    told = ", ".join(f"{name} {_megabytes(run)}" for name, run in runs.items())
    if budget is not None:
        filling = f"budget {budget / 1e6:,.2f} MB, {compressed.held[-1][1] / budget:.0%} taken"
        legend, told = f'{legend}<span class="budget">{filling}</span>', f"{told}, {filling}"
        if budget <= top:
            y = HEIGHT * (1 - budget / top)
            lines += f'<line class="budget" x1="0" x2="{WIDTH:g}" y1="{y:.2f}" y2="{y:.2f}"/>'
    said = escape(f"Megabytes over tokens: {told}")
    scale = "".join(f'<span style="top:{100 * (1 - part):g}%">{top * part / 1e6:g}</span>' for part in (0, 0.5, 1))
    return (
        f'<div class="legend">{legend}</div><div class="chart"><div class="scale">{scale}</div>'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<g class="grid">{grid}</g>{lines}</svg></div>'
        f'<div class="below"><span>0</span><span>tokens, mean over layers</span>'
        f"<span>{last_token:,}</span></div>"
    )


def _megabytes(run: CacheRun) -> str:
    return f"{run.held[-1][1] / 1e6:,.2f} MB"


def _at_the_end(run: CacheRun, last_token: int) -> float:
    """Returns the extrapolated bytes at the end, so that the axis stays while its line grows."""
    tokens, held = run.held[-1]
    return held * last_token / tokens if tokens else 0.0


def _most(dense: CacheRun) -> float:
    """Returns the bytes up to which a budget is drawn: twice those of the dense cache."""
    return 2.0 * dense.held[-1][1]


def _top(most: float) -> float:
    """Returns the axis end: the least of 1, 1.2, 1.5, 2, 3, 4, 5, 6, 8 times a power of ten not below `most`."""
    if most <= 0:
        return 1e6
    power = 10.0 ** math.floor(math.log10(most))
    return power * next(step for step in (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= most * 0.999)


def _points(run: CacheRun, last_token: int, top: float) -> str:
    every = -(-len(run.held) // MOST_POINTS)
    shown = [*run.held[:-1:every], run.held[-1]]
    return " ".join(
        f"{WIDTH * tokens / last_token:.1f},{HEIGHT * (1 - min(1.0, held / top)):.2f}" for tokens, held in shown
    )
