"""HTML of what every head keeps, one button for each, and of the text as one of them keeps it."""

from __future__ import annotations

from ..cache.report import LayerReport, level_counts
from ..plot.coloured_text import ColouredText
from ..plot.palette import LEVELS
from .figures import message
from .generation import Result

# layer index and KV head
Place = tuple[int, int]
NOTHING = message("Generate first; what every head keeps then appears here, and the text in the colours of its levels.")
# tells the page which head was clicked, by mouse or keyboard
ON_LOAD = """element.addEventListener('click', event => {
    const head = event.target.closest('button[data-layer]');
    if (head) trigger('click', {place: [Number(head.dataset.layer), Number(head.dataset.head)]});
});"""


def place_in(result: Result, place: Place) -> Place:
    """`place` where the model has such a head, else the nearest one of its layer or of the model."""
    layer_idx = place[0] if place[0] in result.levels else min(result.levels)
    return layer_idx, min(place[1], result.levels[layer_idx].shape[0] - 1)


def overview(result: Result, chosen: Place) -> str:
    """A row for each compressed layer, in it a button for each KV head: the shares of its tokens at each level."""
    rows = "".join(
        f'<span class="layer">{layer.layer_idx}</span><span class="row">{_buttons(layer, chosen)}</span>'
        for layer in result.memory.layers
    )
    note = "Each bar is a KV head, each row a layer; a colour's length is its share of the tokens. Click one."
    return f'<p class="note">{note}</p><div class="overview" role="group" aria-label="heads">{rows}</div>'


def _buttons(layer: LayerReport, chosen: Place) -> str:
    buttons = []
    for head, counts in enumerate(zip(*(getattr(layer, name) for name in LEVELS))):
        tokens, stops, start = max(1, sum(counts)), [], 0.0
        for count, colour in zip(counts, LEVELS.values()):
            end = start + 100 * count / tokens
            stops.append(f"{colour} {start:.1f}% {end:.1f}%")
            start = end
        shares = ", ".join(f"{name} {count / tokens:.0%}" for name, count in zip(LEVELS, counts))
        said = f"layer {layer.layer_idx}, KV head {head}: {shares}"
        pressed = "true" if (layer.layer_idx, head) == chosen else "false"
        look = f"background:linear-gradient(to right,{','.join(stops)})"
        buttons.append(
            f'<button type="button" data-layer="{layer.layer_idx}" data-head="{head}" aria-pressed="{pressed}" '
            f'aria-label="{said}" title="{said}" style="{look}"></button>'
        )
    return "".join(buttons)


def coloured_text(result: Result, place: Place) -> str:
    """The text of a run, every word in the colour of its tokens' levels in one layer and KV head."""
    layer_idx, head = place
    counts = level_counts(result.levels[layer_idx][head : head + 1])
    title = f"layer {layer_idx}, KV head {head}"
    return ColouredText(result.pieces, counts, title, result.prompt_tokens).words().html()
