"""HTML of what the user sees: messages, figures, and the text coloured by level."""

from __future__ import annotations

import itertools
from html import escape

from generation import Result, Side

from hf_diffkv.report import LEVELS

# by the code that `DiffKVCache.levels` gives
NAMES = {2: "high", 1: "low", 3: "window", 0: "pruned"}
INK = {"high": "#ffffff", "low": "#0b2a3f", "window": "#3d2600", "pruned": "#6b7280"}
CSS = (
    """
.message { padding: .55em .9em; border-radius: 8px; background: var(--block-background-fill); }
.message[role=alert] { background: #fde8e8; color: #8a1c1c; border-left: 4px solid #c53030; }
.figures, .figures tr { border: 0 !important; }
.figures { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.figures th, .figures td { text-align: left; padding: .35em .8em; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
.figures .bar { height: 8px; border-radius: 4px; margin-top: .25em; min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .5em; margin-bottom: .6em; }
.legend .level { padding: .15em .7em; border-radius: 999px; font-size: .9em; }
.levels { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85em; line-height: 1.55;
  column-width: 30em; margin: 0; padding: .8em; border: 1px solid var(--border-color-primary); border-radius: 8px; }
.plain textarea { font-family: var(--font-mono); }
.levels .answer { outline: 2px solid #d35400; }
"""
    + "\n".join(f".level.{name} {{ background: {color}; color: {INK[name]}; }}" for name, color in LEVELS.items())
    + "\n.levels .pruned { text-decoration: line-through; }"
)


def message(text: str, error: bool = False) -> str:
    return f'<div class="message" role="{"alert" if error else "status"}">{escape(text)}</div>'


def figures(result: Result) -> str:
    """Bytes, speed and agreement of both runs."""
    dense, compressed, memory = result.dense, result.compressed, result.memory
    payload = memory.payload_bytes
    whole = max(1, dense.cache_bytes)
    rows = [
        ("cache, real bytes", _bytes(dense.cache_bytes, whole), _bytes(compressed.cache_bytes, whole)),
        ("cache, payload only", _bytes(dense.cache_bytes, whole), _bytes(payload, whole)),
        ("prompt", f"{dense.prompt_seconds:.2f} s", f"{compressed.prompt_seconds:.2f} s"),
        ("decoding", _rate(dense), _rate(compressed)),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{a}</td><td>{b}</td></tr>" for name, a, b in rows)
    head = "<tr><th></th><th>DynamicCache</th><th>DiffKV</th></tr>"
    last = f'<tr><th>agreement</th><td colspan="2">{_agreement(result)}</td></tr>'
    return f'<table class="figures">{head}{body}{last}</table>'


def _bytes(count: int, whole: int) -> str:
    share = count / whole
    bar = f'<div class="bar" style="width:{min(1, share):.1%};background:{LEVELS["low"]}"></div>'
    return f"{count / 1e6:,.2f} MB ({share:.1%}){bar}"


def _rate(side: Side) -> str:
    rate = side.tokens_per_second
    return "-" if rate is None else f"{rate:.1f} tokens/s"


def _agreement(result: Result) -> str:
    found = result.agreement
    if found.equal == found.tokens:
        return f"all {found.tokens} tokens are equal"
    equal = f"{found.equal} of {found.tokens} tokens are equal ({found.equal / found.tokens:.0%})"
    return f"{equal}; the first {found.until_difference} without a difference"


def coloured_text(result: Result | None, layer_idx: int, head: int) -> str:
    """The text of a run with every token in the colour of its level in one layer and KV head."""
    if result is None:
        return message("Generate first; the prompt then appears here, every token in the colour of its level.")
    levels = result.levels[layer_idx]
    if head >= levels.shape[0]:
        return message(f"Layer {layer_idx} has {levels.shape[0]} KV heads; choose one of them.", error=True)
    codes = levels[head].tolist()
    runs = itertools.groupby(range(len(codes)), key=lambda i: (codes[i], i >= result.prompt_tokens))
    spans = [_span(NAMES[code], list(indices), answer, result.pieces) for (code, answer), indices in runs]
    place = f"layer {layer_idx}, KV head {head}"
    return f'{_legend(codes)}<pre class="levels" aria-label="{place}">{"".join(spans)}</pre>'


def _span(name: str, indices: list[int], answer: bool, pieces: list[str]) -> str:
    text = escape("".join(pieces[indices[0] : indices[-1] + 1])).replace("\n", "↵\n")
    part = "generated" if answer else "prompt"
    title = f"{name}, {part}, tokens {indices[0]} to {indices[-1]}"
    return f'<span class="level {name}{" answer" if answer else ""}" title="{title}">{text}</span>'


def _legend(codes: list[int]) -> str:
    counts = {name: codes.count(code) for code, name in NAMES.items()}
    chips = [
        f'<span class="level {name}">{name}: {count:,} ({count / len(codes):.0%})</span>'
        for name, count in counts.items()
    ]
    return f'<div class="legend">{"".join(chips)}<span>framed: generated</span></div>'
