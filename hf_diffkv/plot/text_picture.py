"""The coloured text as a picture: characters in cells of one width."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from .figure import SIZE, SMALL, Picture, new_figure
from .palette import EDGE, FRAME, INK, LEVELS, ink_on
from .runs import ColourRun, LevelledText

# comes with Matplotlib; each character is 0.602 of its size wide
FONT, ADVANCE = "DejaVu Sans Mono", 0.602
LINE_CELLS = 100
# inches of a cell, and lines of the tallest picture
CELL, LINE, MOST_LINES = ADVANCE * SIZE / 72, 0.19, 500
HEAD, MARGIN = 2, 0.15


def draw(shown: LevelledText) -> Picture:
    """Raises `ValueError` where the text takes more than `MOST_LINES` lines, `ImportError` without matplotlib."""
    parts = list(_parts(shown))
    lines = HEAD + parts[-1][0] + 1 if parts else HEAD
    if lines > MOST_LINES:
        raise ValueError(
            f"the text takes {lines} lines, more than {MOST_LINES} fit a picture; save it as .html instead."
        )
    width, height = LINE_CELLS * CELL + 2 * MARGIN, lines * LINE + 2 * MARGIN
    figure = new_figure(width, height, layout=None)
    axis = figure.add_axes((MARGIN / width, MARGIN / height, 1 - 2 * MARGIN / width, 1 - 2 * MARGIN / height))
    axis.set(xlim=(0, LINE_CELLS), ylim=(lines, 0))
    axis.axis("off")
    _legend(axis, shown)
    for line, column, cells, text, run in parts:
        colour = run.colour
        if colour:
            _box(axis, column, HEAD + line, cells, colour)
        if text.strip():
            ink = ink_on(colour) if colour else EDGE
            _write(axis, column, HEAD + line, text, ink)
        if run.generated:
            axis.plot((column, column + cells), (HEAD + line + 0.95,) * 2, color=FRAME, linewidth=1.5)
    return Picture(figure)


def _parts(shown: LevelledText) -> Iterator[tuple[int, int, int, str, ColourRun]]:
    """Line, column, cells, text and run of each stretch of one colour on one line. A line's end is an empty cell."""
    places = _places("".join(shown.pieces))
    for run in shown.runs():
        characters = "".join(shown.pieces[run.start : run.stop])
        placed = [(*next(places), character) for character in characters]
        for line, members in itertools.groupby(placed, key=lambda place: place[0]):
            stretch = list(members)
            text = "".join(" " if character in "\n\t" else character for _, _, character in stretch)
            column = stretch[0][1]
            yield line, column, min(sum(map(_cells, text)), LINE_CELLS - column), text, run


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Line and column of each character; words are kept whole where they fit a line."""
    line = column = 0
    for word in re.findall(r"\n|[^\S\n]+|\S+", text):
        width = sum(map(_cells, word))
        if word.strip() and column and column + width > LINE_CELLS >= width:
            line, column = line + 1, 0
        for character in word:
            if character != "\n" and column + _cells(character) > LINE_CELLS:
                line, column = line + 1, 0
            yield line, column
            line, column = (line + 1, 0) if character == "\n" else (line, column + _cells(character))


def _cells(character: str) -> int:
    if character == "\t":
        return 1
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cc", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _legend(axis: Any, shown: LevelledText) -> None:
    column = 0
    for name, share in shown.totals().items():
        label = f" {name} {share:.0%} "
        _box(axis, column, 0, len(label), LEVELS[name])
        _write(axis, column, 0, label, ink_on(LEVELS[name]))
        column += len(label) + 1
    note = shown.title + ("; underlined: generated" if shown.generated_from is not None else "")
    axis.text(column + 1, 0.5, note, fontsize=SMALL, va="center", color=INK)


def _box(axis: Any, column: float, line: float, cells: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((column, line + 0.05), cells, 0.9, facecolor=colour, linewidth=0))


def _write(axis: Any, column: int, line: int, text: str, ink: str) -> None:
    """Each character in its cell, also those whose width in the font is another one."""
    parts = [text] if text.isascii() else list(text)
    for part in parts:
        if part.strip():
            axis.text(
                column, line + 0.5, part, fontsize=SIZE, family=FONT, va="center_baseline", color=ink, parse_math=False
            )
        column += sum(map(_cells, part))
