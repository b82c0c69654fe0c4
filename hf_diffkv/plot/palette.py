"""The palette: levels and caches have the same colour in every picture, web page and terminal of the project.

The colours of levels get lighter in stacking order, so they stay distinct in greyscale and for colour-blind readers.
Caches also differ by mark and dash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

# in stacking order
LEVELS = {"high": "#08306b", "low": "#2f80c4", "window": "#eea62a", "pruned": "#e6e8eb"}
# nearest of the 256 terminal colours
TERMINAL = {"high": 17, "low": 68, "window": 214, "pruned": 254}
INK, PAPER = "#1a1a1a", "#ffffff"
GRID, EDGE = "#d9dce1", "#9aa1ab"
# frame around generated text
FRAME = "#d0021b"
DASHES = ("solid", "dashed", "dotted", "dashdot")
MARKS = ("o", "^", "v", "d")


@dataclass(frozen=True)
class Style:
    """Style of a cache's curve: Matplotlib's names of a colour, a marker and a line style."""

    colour: str
    mark: str
    dash: str = "solid"


# styles by the beginning of a cache's or method's name, in lower case without spaces and hyphens
CACHE_STYLES = {
    "dynamiccache": Style("#1a1a1a", "*"),
    "dense": Style("#1a1a1a", "*"),
    # uses as much memory as a dynamic cache, so its curve overlaps that one and must leave it visible
    "staticcache": Style("#9a9a9a", "x", "dashed"),
    "quantizedcachehqq": Style("#e59cc4", "D"),
    "hqq": Style("#e59cc4", "D"),
    "quantizedcache": Style("#d55e00", "s", "dashed"),
    "quanto": Style("#d55e00", "s", "dashed"),
    "fp8": Style("#005a43", "P"),
    "kvpress": Style("#7a4b00", "X"),
    "llamacpp": Style("#8b5cf6", "^"),
    "diffkv": Style("#0072b2", "o"),
}
OTHER = Style("#6b7280", "p")
# styles of series that are not caches
GROUPS = (Style("#0072b2", "o"), Style("#d55e00", "s"), Style("#005a43", "^"), Style("#e59cc4", "D"))


def style_of(name: str) -> Style:
    """Returns the style of the family that a cache or method belongs to."""
    return next((style for start, style in CACHE_STYLES.items() if _plain(name).startswith(start)), OTHER)


def order_of(name: str) -> tuple[int, str]:
    """Returns a sort key for legends: the order of `CACHE_STYLES`, other names first."""
    starts = [index for index, start in enumerate(CACHE_STYLES) if _plain(name).startswith(start)]
    return (starts[0] if starts else -1, name)


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Returns a different style for each name: members of a family share its colour and differ by dash and mark."""
    styles: dict[str, Style] = {}
    for name in names:
        family = style_of(name)
        before = sum(style_of(other) == family for other in styles)
        marks = (family.mark, *(mark for mark in MARKS if mark != family.mark))
        dashes = (family.dash, *(dash for dash in DASHES if dash != family.dash))
        styles[name] = replace(family, mark=marks[before % len(marks)], dash=dashes[before % len(dashes)])
    return styles


def ink_on(colour: str) -> str:
    """Returns black or white, whichever is more legible on `colour` (WCAG 2.1, contrast ratio)."""
    brightness = luminance(colour)
    return "#000000" if (brightness + 0.05) / 0.05 > 1.05 / (brightness + 0.05) else PAPER


def luminance(colour: str) -> float:
    """Returns the relative luminance of "#rrggbb" (WCAG 2.1), from 0 (black) to 1 (white)."""
    shares = (channel / 255 for channel in channels(colour))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def channels(colour: str) -> tuple[int, int, int]:
    """Returns red, green and blue of "#rrggbb", 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def shades(count: int) -> list[str]:
    """Returns `count` colours of increasing darkness, from the colour of the pruned level to that of the high level."""
    light, dark = channels(LEVELS["pruned"]), channels(LEVELS["high"])
    steps = [index / max(1, count - 1) for index in range(count)] if count > 1 else [1.0]
    return ["#" + "".join(f"{round(a + (b - a) * step):02x}" for a, b in zip(light, dark)) for step in steps]


def mixed(shares: Mapping[str, float]) -> str:
    """Returns the mean colour of levels, weighted by their shares, which must add up to 1."""
    parts = [(share, channels(LEVELS[name])) for name, share in shares.items()]
    return "#" + "".join(f"{round(sum(share * colour[i] for share, colour in parts)):02x}" for i in range(3))


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "")
