"""HTML for what a run's setting does: the bits of each head or, if tokens are chosen, what each head keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hf_diffkv.cache.report import LayerReport, level_counts
from hf_diffkv.plot.overview import precision_colours
from hf_diffkv.plot.palette import LEVELS, style_of
from hf_diffkv.precision import Precision

from .coloured_text import ColouredText
from .figures import message
from .generation import Result

# layer index and KV head
Place = tuple[int, int]
NOTHING = message("Generate something first; a picture of what the setting does will then appear here.")
# tells the page which head was clicked, by mouse or keyboard
ON_LOAD = """element.addEventListener('click', event => {
    const head = event.target.closest('button[data-layer]');
    if (head) trigger('click', {place: [Number(head.dataset.layer), Number(head.dataset.head)]});
});"""
BLUE = style_of("DiffKV").colour
PALE = "#cfe3f1"


def place_in(result: Result, place: Place) -> Place:
    """Returns `place` if it has levels, else the nearest head of its layer or of the first layer with levels."""
    if not result.levels:
        return place
    layer_idx = place[0] if place[0] in result.levels else min(result.levels)
    return layer_idx, min(place[1], result.levels[layer_idx].shape[0] - 1)


def overview(result: Result, chosen: Place) -> str:
    """Returns the picture for a setting: levels by head, with one `chosen`, rungs, bits by head, or bits of all."""
    if result.selects:
        return _levels(result, chosen)
    if result.compressed.rungs:
        return _rungs(result)
    names = {name for layer in result.memory.layers for name in layer.precisions}
    return _bits_of_heads(result) if len(names) > 1 else _bits_of_all(names.pop(), result.element_bits)


def _levels(result: Result, chosen: Place) -> str:
    """Draws a button for each KV head: the shares of its tokens at each level, stacked."""
    shares = [f"{name} {share:.0%}" for name, share in _shares(Counter(result.memory.tokens)).items()]
    note = "One column per layer, one bar per KV head: the shares of its tokens. Click one to see its text below."
    cells = (_button(layer, head, chosen) for layer in result.memory.layers for head in range(len(layer.high)))
    return _note(f"How many bits each token keeps. {note}") + _grid(result, cells) + _legend(LEVELS.values(), shares)


def _button(layer: LayerReport, head: int, chosen: Place) -> str:
    counts = {name: getattr(layer, name)[head] for name in LEVELS}
    stops, start = [], 0.0
    for name, share in _shares(counts).items():
        stops.append(f"{LEVELS[name]} {start:.1f}% {start + 100 * share:.1f}%")
        start += 100 * share
    shares = ", ".join(f"{name} {share:.0%}" for name, share in _shares(counts).items())
    said = f"layer {layer.layer_idx}, KV head {head}: {shares}"
    pressed = "true" if (layer.layer_idx, head) == chosen else "false"
    look = f"background:linear-gradient(to top,{','.join(stops)})"
    return (
        f'<button type="button" data-layer="{layer.layer_idx}" data-head="{head}" aria-pressed="{pressed}" '
        f'aria-label="{said}" title="{said}" style="{look}"></button>'
    )


def _shares(counts: dict[str, int] | Counter[str]) -> dict[str, float]:
    tokens = max(1, sum(counts.values()))
    return {name: counts[name] / tokens for name in LEVELS}


def _bits_of_heads(result: Result) -> str:
    """Draws a cell for each KV head, darker for more bits."""
    colours = precision_colours(result.memory)
    counts = Counter(name for layer in result.memory.layers for name in layer.precisions)
    cells = (
        f'<i title="layer {layer.layer_idx}, KV head {head}: {name}" style="background:{colours[name]}"></i>'
        for layer in result.memory.layers
        for head, name in enumerate(layer.precisions)
    )
    note = "One column per layer, one cell per KV head. Heads that lose more of the text at few bits get more."
    heads = [f"{name}: {counts[name]} heads" for name in colours]
    return (
        _note(f"How many bits each head keeps. {note} K6V4 means 6 bits per key element, 4 per value element.")
        + _grid(result, cells)
        + _legend(colours.values(), heads)
    )


def _rungs(result: Result) -> str:
    """Draws a bar for each layer: the share of its heads still at the precise rung, with the others above."""
    memory, shares = result.memory, result.compressed.rungs
    names = {name for layer in memory.layers for name in layer.precisions}
    lowered = "/".join(sorted(names - {memory.until_full}, reverse=True)) or "fewer bits"
    look = "background:linear-gradient(to top,{0} {2:.1f}%,{1} {2:.1f}%)"
    cells = "".join(
        f'<i role="img" aria-label="{said}" title="{said}" style="{look.format(BLUE, PALE, 100 * share)}"></i>'
        for layer, share in zip(memory.layers, shares)
        for said in [f"layer {layer.layer_idx}: {share:.0%} of heads at {memory.until_full}"]
    )
    whole = sum(shares) / len(shares)
    note = f"All heads stay at {memory.until_full} until the budget is full; those that lose least are lowered first. "
    note += f"{memory.filled:.0%} of the budget is in use, {memory.lowered:,} tokens of heads were lowered after they "
    note += f"were stored, and {memory.room:,} more tokens fit."
    layers = f"<span>layer {memory.layers[0].layer_idx}</span><span>layer {memory.layers[-1].layer_idx}</span>"
    legend = [f"{memory.until_full}: {whole:.0%} of heads", f"{lowered}: {1 - whole:.0%}"]
    return (
        _note(f"Which heads are precise. {note}")
        + f'<div class="rungs">{cells}</div><div class="below">{layers}</div>'
        + _legend((BLUE, PALE), legend)
    )


def _bits_of_all(name: str, element_bits: int) -> str:
    """Draws one precision as filled bits, out of those of an uncompressed element."""
    precision = Precision.parse(name)
    rows = ""
    for kind, bits in (("key", precision.k_bits), ("value", precision.v_bits)):
        cells = "".join(f'<i class="{"kept" if bit < bits else "left"}"></i>' for bit in range(element_bits))
        rows += f'<span>{kind}</span><span class="bits" role="img" aria-label="{kind}: {bits} of {element_bits} bits">'
        rows += f"{cells}</span><b>{bits} of {element_bits}</b>"
    note = "Bits per key element and per value element, the same for all layers, heads and stored tokens."
    return _note(f"How many bits are kept. {note}") + f'<div class="precision" style="--kept:{BLUE}">{rows}</div>'


def _grid(result: Result, cells: Iterable[str]) -> str:
    """Arranges cells by layer and head, one column per layer."""
    layers = result.memory.layers
    rows = max(len(layer.high) for layer in layers)
    height = max(8, min(44, 144 // rows))
    ends = f"<span>layer {layers[0].layer_idx}</span><span>layer {layers[-1].layer_idx}</span>"
    look = f"grid-template-rows:repeat({rows},{height}px)"
    return (
        f'<div class="heads" role="group" aria-label="heads" style="{look}">{"".join(cells)}</div>'
        f'<div class="below">{ends}</div>'
    )


def _legend(colours: Iterable[str], names: Iterable[str]) -> str:
    parts = (f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in zip(colours, names))
    return f'<div class="legend">{"".join(parts)}</div>'


def _note(text: str) -> str:
    title, _, more = text.partition(". ")
    return f'<p class="note"><b>{title}.</b> {more}</p>'


def coloured_text(result: Result, place: Place) -> str:
    """Returns a run's text with each word coloured by its tokens' levels in one KV head; empty without levels."""
    if not result.levels:
        return ""
    layer_idx, head = place
    counts = level_counts(result.levels[layer_idx][head : head + 1])
    title = f"layer {layer_idx}, KV head {head}"
    return ColouredText(result.pieces, counts, title, result.prompt_tokens).words().html()
