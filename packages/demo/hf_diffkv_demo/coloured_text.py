"""Text with tokens coloured by level, as HTML or as a picture in a monospaced font."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_diffkv.plot.figure import SIZE, SMALL, Picture, new_figure
from hf_diffkv.plot.palette import EDGE, FRAME, INK, LEVELS, PAPER, ink_on, mixed
from hf_diffkv.plot.pieces import pieces_of_ids
from hf_diffkv.replacing import save_text

if TYPE_CHECKING:
    from hf_diffkv.cache.diffkv_cache import DiffKVCache

LONGEST_WORD = 24
NEWLINE = "↵"
STYLE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,monospace;font-size:.9em;line-height:1.6;"
    f"background:{PAPER};color:{INK};margin:0;padding:.8em;border:1px solid {EDGE};border-radius:8px"
)
CHIP = "padding:.15em .7em;border-radius:999px;font-size:.9em"
PAGE = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
PAGE += '<meta name="color-scheme" content="light dark"><title>{title}</title>\n'
PAGE += (
    '<body style="font-family:system-ui,sans-serif;max-width:60em;margin:1em auto;padding:0 1em">\n{body}\n</html>\n'
)
# font that comes with Matplotlib; a character's width is 0.602 of the font size
FONT, ADVANCE = "DejaVu Sans Mono", 0.602
LINE_CELLS = 100
# size of a cell in inches, and maximum number of lines of a picture
CELL, LINE, MOST_LINES = ADVANCE * SIZE / 72, 0.19, 500
HEAD, MARGIN = 2, 0.15


@dataclass(frozen=True)
class ColourRun:
    """Neighbouring tokens of one colour.

    Attributes:
        start, stop: range of the tokens, excluding `stop`.
        shares: share of the heads at each level, by its name; empty for padding.
        generated: whether the model generated the tokens.
    """

    start: int
    stop: int
    shares: tuple[tuple[str, float], ...]
    generated: bool

    @property
    def colour(self) -> str | None:
        """Colour as "#rrggbb"; None for padding, which has no level."""
        return mixed(dict(self.shares)) if self.shares else None

    @property
    def said(self) -> str:
        """Levels in words, with their shares."""
        return ", ".join(name if share == 1 else f"{name} {share:.0%}" for name, share in self.shares if share)


@dataclass(frozen=True)
class ColouredText:
    """Text with tokens coloured by level, or in a mean colour if heads differ. Notebooks display it.

    Attributes:
        pieces: text of each token.
        counts: number of heads at each level for each token, by the level's name.
        title: description of the layers and heads that the levels are taken from.
        generated_from: index of the first generated token; None marks no token as generated.
        unit: unit of `pieces`, tokens or words.
    """

    pieces: Sequence[str]
    counts: Mapping[str, Sequence[int]]
    title: str
    generated_from: int | None = None
    unit: str = "tokens"

    def words(self) -> ColouredText:
        """Returns the text with one colour per word, the mean over the word's tokens and heads.

        A word includes the space in front of it. It has at most `LONGEST_WORD` characters, unless a token is longer. A
        word never joins tokens of the prompt with generated ones.
        """
        starts = list(self._word_starts())
        spans = list(zip(starts, [*starts[1:], len(self.pieces)]))
        first = self.generated_from
        return ColouredText(
            ["".join(self.pieces[start:stop]) for start, stop in spans],
            {name: [sum(counts[start:stop]) for start, stop in spans] for name, counts in self.counts.items()},
            self.title,
            None if first is None else sum(start < first for start in starts),
            "words",
        )

    def _word_starts(self) -> Iterator[int]:
        """Yields the index of each word's first token."""
        before, length = "", 0
        for index, piece in enumerate(self.pieces):
            new = piece[:1].isspace() and not before.isspace()
            if index in (0, self.generated_from) or new or length + len(piece) > LONGEST_WORD:
                yield index
                length = 0
            before, length = piece[-1:] or before, length + len(piece)

    def runs(self) -> Iterator[ColourRun]:
        """Yields the text in order, as runs of one colour."""
        first = len(self.pieces) if self.generated_from is None else self.generated_from
        for (shares, generated), tokens in itertools.groupby(
            range(len(self.pieces)), key=lambda i: (self._shares(i), i >= first)
        ):
            members = list(tokens)
            yield ColourRun(members[0], members[-1] + 1, shares, generated)

    def _shares(self, token: int) -> tuple[tuple[str, float], ...]:
        heads = sum(counts[token] for counts in self.counts.values())
        return tuple((name, counts[token] / heads) for name, counts in self.counts.items()) if heads else ()

    def totals(self) -> dict[str, float]:
        """Returns each level's share of all tokens and heads."""
        sums = {name: sum(counts) for name, counts in self.counts.items()}
        return {name: count / max(1, sum(sums.values())) for name, count in sums.items()}

    def html(self) -> str:
        """Returns a legend and the text as HTML for any page: styles are inline and the background is white."""
        spans = "".join(self._span(run) for run in self.runs())
        return f'{self._legend()}<pre class="levels" aria-label="{escape(self.title)}" style="{STYLE}">{spans}</pre>'

    def _span(self, run: ColourRun) -> str:
        text = escape("".join(self.pieces[run.start : run.stop])).replace("\n", f"{NEWLINE}\n")
        names = "generated" if run.generated else "prompt"
        title = f"{run.said or 'padding'}; {names}, {self.unit} {run.start} to {run.stop - 1}"
        only = [name for name, share in run.shares if share == 1]
        look = f"background:{run.colour};color:{ink_on(run.colour)}" if run.colour else "opacity:.5"
        look += f";outline:2px solid {FRAME}" * run.generated
        kind = " ".join(("level", *(only or ["mixed"]), *(["generated"] if run.generated else [])))
        return f'<span class="{kind}" style="{look}" title="{title}">{text}</span>'

    def _legend(self) -> str:
        chips = [
            f'<span style="{CHIP};background:{colour};color:{ink_on(colour)}">{name} {self.totals()[name]:.0%}</span>'
            for name, colour in LEVELS.items()
        ]
        framed = f'<span style="{CHIP};outline:2px solid {FRAME};outline-offset:-2px">generated</span>'
        chips += [framed] * (self.generated_from is not None)
        inner = f"<b>{escape(self.title)}</b>" + "".join(chips)
        return f'<div style="display:flex;flex-wrap:wrap;gap:.5em;align-items:center;margin-bottom:.6em">{inner}</div>'

    def _repr_html_(self) -> str:
        return self.html()

    def save(self, path: str | os.PathLike) -> Path:
        """Writes a web page (.html) or a picture (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib, which pictures need, is not installed.
            ValueError: the text is too long for a picture.
        """
        path = Path(path)
        if path.suffix == ".html":
            save_text(PAGE.format(title=escape(self.title), body=self.html()), path)
            return path
        return _picture(self).save(path)


def text(
    cache: DiffKVCache,
    tokens: Sequence[int] | Sequence[str] | Any,
    tokenizer: Any = None,
    *,
    layer_idx: int | None = None,
    head: int | None = None,
    request: int = 0,
    generated_from: int | None = None,
) -> ColouredText:
    """Colours the text of a request by level: the mean over all heads, over the heads of a layer, or one head.

    Args:
        cache: cache that has seen the tokens.
        tokens: ids, int64 [tokens], as `generate()` returns them, or the text of each token. Tokens that the cache has
            not seen, such as the last generated one, are left out.
        tokenizer: tokenizer of the model; needed for ids.
        layer_idx: index of the layer; None for all.
        head: index of the KV head; None for all.
        request: index of the request within the batch.
        generated_from: number of prompt tokens; the tokens after them are framed.

    Raises:
        ValueError: there is no such layer, head or request, the cache is empty or has seen more tokens than are given,
            or ids are given without a tokenizer.
    """
    from hf_diffkv.cache.report import level_counts, levels_of_request

    levels = levels_of_request(cache, request, layer_idx, head)
    seen, given = levels.shape[1], list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    if len(given) < seen:
        raise ValueError(f"tokens has {len(given)} tokens, but the cache has seen {seen}; give all of them.")
    if given and not isinstance(given[0], str):
        if tokenizer is None:
            raise ValueError("tokens are ids, whose text only a tokenizer knows; give tokenizer as well.")
        given = pieces_of_ids(tokenizer, given[:seen])
    place = "all layers and heads" if layer_idx is None else f"layer {layer_idx}"
    place += "" if layer_idx is None else ", all KV heads" if head is None else f", KV head {head}"
    return ColouredText(given[:seen], level_counts(levels), place, generated_from)


def _picture(shown: ColouredText) -> Picture:
    """Draws the text.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the text takes more than `MOST_LINES` lines.
    """
    parts = list(_parts(shown))
    lines = HEAD + parts[-1][0] + 1 if parts else HEAD
    if lines > MOST_LINES:
        raise ValueError(
            f"the text takes {lines} lines, more than {MOST_LINES} fit in a picture; save it as .html instead."
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


def _parts(shown: ColouredText) -> Iterator[tuple[int, int, int, str, ColourRun]]:
    """Yields line, column, cells, text and run of each stretch of one colour on a line. A newline is an empty cell."""
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
    """Yields line and column of each character; a word that fits on a line is not split."""
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


def _legend(axis: Any, shown: ColouredText) -> None:
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
    """Writes each character into its own cell, even if its width in the font differs."""
    parts = [text] if text.isascii() else list(text)
    for part in parts:
        if part.strip():
            axis.text(
                column, line + 0.5, part, fontsize=SIZE, family=FONT, va="center_baseline", color=ink, parse_math=False
            )
        column += sum(map(_cells, part))
