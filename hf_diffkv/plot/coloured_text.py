"""The text itself, every token in the colour of its level."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .palette import EDGE, FRAME, INK, LEVELS, PAPER, ink_on
from .runs import ColourRun, LevelledText

if TYPE_CHECKING:
    from ..cache.diffkv_cache import DiffKVCache

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


class ColouredText(LevelledText):
    """A text whose tokens have the colours of their levels; where heads differ, the mean colour. Notebooks show it."""

    def html(self) -> str:
        """A legend and the text; all styles are in it, and the text is on white, so it can stand in any page."""
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
        """Writes a page (.html) or a picture (.png, .svg, .pdf).

        Raises:
            ImportError: a picture without matplotlib.
            ValueError: a picture of too long a text.
        """
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(PAGE.format(title=escape(self.title), body=self.html()), encoding="utf-8")
            return path
        from .text_picture import draw

        return draw(self).save(path)


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
    """The text of a request, coloured by level: the mean over all heads, over those of a layer, or one head.

    Args:
        tokens: int64 [tokens] ids, as `generate()` returns them, or the text of each. Those that the cache has not
            seen, such as the last one generated, are left out.
        tokenizer: that of the model; needed for ids.
        layer_idx, head: None for all.
        generated_from: number of the prompt's tokens; those behind it are framed.

    Raises:
        ValueError: no such layer, head or request, an empty cache, fewer tokens than it has seen, or ids without a
            tokenizer.
    """
    from ..cache.report import level_counts, levels_of_request
    from .pieces import pieces_of_ids

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
