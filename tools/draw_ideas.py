"""Draws the figures of docs/how-it-works.md as SVG, in the palette of all figures: `python tools/draw_ideas.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from hf_diffkv.config.presets import RATIOS
from hf_diffkv.heads.allocation import allocate
from hf_diffkv.heads.lookup import SHIPPED
from hf_diffkv.heads.sensitivity import Sensitivity
from hf_diffkv.plot.palette import EDGE, GRID, INK, LEVELS, PAPER, ink_on, shades

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "drawings"
WIDTH, MARGIN = 720, 20
CELL, GAP = 30, 3
FONT = 'font-family="system-ui, sans-serif"'


def box(
    x: float, y: float, width: float, height: float, colour: str = PAPER, text: str = "", dashed: bool = False
) -> str:
    """A rectangle with a word in its middle."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    shape = f'<rect {place} rx="3" fill="{colour}" stroke="{EDGE}"{dash}/>'
    return shape + (words(x + width / 2, y + height / 2 + 4.5, text, ink_on(colour), "middle", 13) if text else "")


def words(
    x: float, y: float, text: str, colour: str = INK, anchor: str = "start", size: int = 14, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}"{weight} {FONT}>{escape(text)}</text>'


def arrow(x: float, y: float, x2: float, y2: float) -> str:
    return f'<path d="M{x:g} {y:g}L{x2:g} {y2:g}" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'


def cells(x: float, y: float, levels: str, labels: Sequence[str] = ()) -> str:
    """A row of tokens; h, l, w and p are their levels."""
    names = {name[0]: name for name in LEVELS}
    return "".join(
        box(x + i * (CELL + GAP), y, CELL, CELL, LEVELS[names[code]], labels[i] if labels else "")
        for i, code in enumerate(levels)
    )


def levels() -> tuple[int, str]:
    """Levels of a request's tokens in one KV head."""
    kept = "wwhlplhllpphlpwwwww"
    parts = [words(MARGIN, 38, "One request, one KV head: its tokens from the first to the newest", bold=True)]
    parts.append(cells(MARGIN, 55, kept))
    step = CELL + GAP
    parts.append(words(MARGIN, 108, "sinks", size=13))
    parts.append(words(MARGIN + 2 * step, 108, "judged by the attention they receive", size=13))
    parts.append(words(MARGIN + 14 * step, 108, "window", size=13))
    legend = ("high: 8 bits a key, 4 a value", "low: 4 and 2 bits", "window: as the model made them", "pruned: gone")
    for i, (colour, text) in enumerate(zip(LEVELS.values(), legend)):
        x, y = MARGIN + 340 * (i % 2), 130 + 28 * (i // 2)
        parts += [box(x, y, 18, 18, colour), words(x + 27, y + 14, text)]
    return 195, "".join(parts)


def precisions() -> tuple[int, str]:
    """Bits of a key and its value, drawn to scale."""
    rows = (("16-bit", 16, 16, "window"), ("K8V4", 8, 4, "high"), ("K5V4", 5, 4, "high"), ("K4V2", 4, 2, "low"))
    parts = [words(MARGIN, 38, "Bits of one element of a key and of a value", bold=True)]
    unit = 17
    for i, (name, key, value, level) in enumerate(rows):
        y = 56 + 40 * i
        parts.append(words(MARGIN, y + 20, name))
        parts.append(box(MARGIN + 70, y, unit * key, 28, LEVELS[level], f"key {key}"))
        parts.append(
            box(
                MARGIN + 70 + unit * key + 3, y, unit * value, 28, LEVELS[level], f"value {value}" if value > 3 else "2"
            )
        )
    return 228, "".join(parts)


def heads() -> tuple[int, str]:
    """Precision that "balanced" gives each KV head of SmolLM2-135M-Instruct."""
    table = Sensitivity.load(SHIPPED / "smollm2-135m-instruct.json")
    chosen = allocate(table, RATIOS["balanced"]).precisions
    names = sorted({precision.name for layer in chosen for precision in layer})
    colours = dict(zip(names, shades(len(names))))
    title = f"SmolLM2-135M, {RATIOS['balanced']:.1%} of the bytes: a precision for each layer and KV head"
    parts = [words(MARGIN, 38, title, bold=True)]
    width = (WIDTH - 2 * MARGIN - 60) / len(chosen)
    for layer, of_layer in enumerate(chosen):
        for head, precision in enumerate(of_layer):
            place = (MARGIN + 60 + layer * width, 56 + 26 * head, width - 2, 24)
            parts.append(box(*place, colours[precision.name]))
    bottom = 56 + 26 * len(chosen[0])
    parts += [words(MARGIN, 73 + 26 * head, f"head {head}", size=13) for head in range(len(chosen[0]))]
    parts += [words(MARGIN + 60, bottom + 16, "layer 0", size=13)]
    parts += [words(WIDTH - MARGIN, bottom + 16, f"layer {len(chosen) - 1}", anchor="end", size=13)]
    for i, name in enumerate(names):
        x = MARGIN + 60 + 118 * i
        parts += [box(x, bottom + 32, 18, 18, colours[name]), words(x + 26, bottom + 46, name)]
    return bottom + 66, "".join(parts)


def pages() -> tuple[int, str]:
    """One page size for all precisions, and a table that fills from both ends."""
    parts = [words(MARGIN, 38, "Pages of one size hold few high tokens or many low ones", bold=True)]
    for x, level, count in ((MARGIN, "high", 4), (MARGIN + 250, "low", 8), (MARGIN + 500, "", 0)):
        parts.append(box(x, 54, 180, 44, PAPER, "" if level else "free", dashed=not level))
        width = (180 - 4) / max(1, count)
        parts += [box(x + 3 + i * width, 58, width - 2, 36, LEVELS[level]) for i in range(count)]
    parts.append(
        words(MARGIN, 138, "Page table of a head: high pages from the left, low pages from the right", bold=True)
    )
    for i in range(17):
        level = "high" if i < 4 else "low" if i > 12 else ""
        parts.append(box(MARGIN + i * 40, 154, 36, 32, LEVELS[level] if level else PAPER, dashed=not level))
    parts += [arrow(MARGIN + 168, 170, MARGIN + 240, 170), arrow(MARGIN + 512, 170, MARGIN + 440, 170)]
    return 205, "".join(parts)


def step() -> tuple[int, str]:
    """Algorithm 1 for one generated token."""
    parts = [words(MARGIN, 38, "A generated token enters the window; the oldest one there leaves it", bold=True)]
    parts.append(cells(MARGIN + 470, 58, "wwwwww"))
    parts += [words(MARGIN + 470, 112, "window", size=13), words(WIDTH - MARGIN, 112, "new", anchor="end", size=13)]
    parts += [arrow(MARGIN + 462, 73, MARGIN + 400, 73), box(MARGIN + 366, 58, CELL, CELL, LEVELS["window"])]
    parts.append(words(MARGIN + 381, 112, "candidate", anchor="middle", size=13))
    parts.append(arrow(MARGIN + 358, 73, MARGIN + 296, 73))
    parts += [cells(MARGIN + 120, 58, "hhhhh"), words(MARGIN + 120, 112, "its level", size=13)]
    parts += [words(MARGIN, 78, "by attention"), arrow(MARGIN + 135, 122, MARGIN + 135, 158)]
    parts.append(words(MARGIN + 150, 145, "the level's least significant token is checked: it stays, or", size=14))
    parts += [box(MARGIN + 120, 164, CELL, CELL, LEVELS["low"]), words(MARGIN + 160, 184, "goes one level down, or")]
    parts += [box(MARGIN + 360, 164, CELL, CELL, LEVELS["pruned"]), words(MARGIN + 400, 184, "is pruned")]
    return 215, "".join(parts)


def prompt() -> tuple[int, str]:
    """Layer by layer: attention first, then compression."""
    parts = [words(MARGIN, 38, "A prompt, layer by layer: exact attention first, then compression", bold=True)]
    for i, (name, level, width) in enumerate(
        (("layer 0", "high", 60), ("layer 1", "high", 60), ("layer 2", "window", 200))
    ):
        y = 56 + 38 * i
        parts += [words(MARGIN, y + 19, name), box(MARGIN + 80, y, width, 26, LEVELS[level])]
        said = "in pages; its dense keys and values are gone" if level == "high" else "at work: dense, attended exactly"
        parts.append(words(MARGIN + 95 + width, y + 19, said))
    parts += [words(MARGIN, 189, "layer 3"), words(MARGIN + 80, 189, "not computed yet")]
    parts.append(words(MARGIN, 222, "So the peak is the compressed cache and one layer, never the dense cache."))
    return 240, "".join(parts)


def rotation() -> tuple[int, str]:
    """Channels of a key before and after rotation and centring."""
    parts = [words(MARGIN, 38, "Channels of a key (a sketch)", bold=True)]
    as_is = (12, 9, 14, 88, 10, 8, 13, 70, 11, 9, 12, 10)
    rotated = (26, 31, 22, 28, 33, 24, 29, 27, 32, 25, 30, 23)
    for x, heights, said in (
        (MARGIN, as_is, "as they are: a few set the scale"),
        (MARGIN + 370, rotated, "rotated and centred: of similar size"),
    ):
        for i, height in enumerate(heights):
            parts.append(box(x + i * 25, 150 - height, 20, height, LEVELS["low"]))
        parts += [f'<path d="M{x} 150H{x + 300}" stroke="{INK}"/>', words(x, 175, said)]
    parts.append(arrow(MARGIN + 315, 120, MARGIN + 355, 120))
    return 192, "".join(parts)


DRAWINGS: dict[str, Callable[[], tuple[int, str]]] = {
    "levels": levels,
    "precisions": precisions,
    "heads": heads,
    "pages": pages,
    "step": step,
    "prompt": prompt,
    "rotation": rotation,
}


def svg(name: str) -> str:
    """A drawing on a white background, so that it looks the same on light and dark pages."""
    draw = DRAWINGS[name]
    height, inner = draw()
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
    title = escape(draw.__doc__.splitlines()[0])
    paper = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}" stroke="{GRID}"/>'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = inner.replace("><", ">\n<")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{title}</title>\n<defs>{head}</defs>\n'
        f"{paper}\n{lines}\n</svg>\n"
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (FOLDER / f"{name}.svg").write_text(svg(name))


if __name__ == "__main__":
    main()
