"""HTML of what the user sees: messages and figures; the text coloured by level is `hf_diffkv.plot`'s."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from generation import Result, Side

from hf_diffkv.plot import ColouredText
from hf_diffkv.plot.palette import EDGE, style_of
from hf_diffkv.report import level_counts

BLUE = style_of("DiffKV").colour
CSS = """
.message { padding: .55em .9em; border-radius: 8px; background: var(--block-background-fill); }
.message[role=alert] { background: #fde8e8; color: #8a1c1c; border-left: 4px solid #c53030; }
.figures, .figures tr { border: 0 !important; }
.figures { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.figures th, .figures td { text-align: left; padding: .35em .8em; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
.figures .bar { height: 8px; border-radius: 4px; margin-top: .25em; min-width: 2px; }
.big { font-size: 1.6rem; margin: .2em 0 .4em; }
.big b { font-size: 2.6rem; color: var(--body-text-color); }
.difference { font-family: var(--font-mono); white-space: pre-wrap; overflow-wrap: anywhere; }
.difference del { background: #fde8e8; color: #8a1c1c; }
.difference ins { background: #dcecf9; color: #14456b; text-decoration: none; }
.levels { column-width: 28em; }
.plain textarea { font-family: var(--font-mono); }
"""


def message(text: str, error: bool = False) -> str:
    return f'<div class="message" role="{"alert" if error else "status"}">{escape(text)}</div>'


def figures(result: Result) -> str:
    """Bytes, speed and agreement of both runs."""
    dense, compressed, memory = result.dense, result.compressed, result.memory
    payload = memory.payload_bytes
    whole = max(1, dense.cache_bytes)
    rows = [
        ("cache, real bytes", _bytes(dense.cache_bytes, whole, EDGE), _bytes(compressed.cache_bytes, whole, BLUE)),
        ("cache, payload only", _bytes(dense.cache_bytes, whole, EDGE), _bytes(payload, whole, BLUE)),
        ("prompt", f"{dense.prompt_seconds:.2f} s", f"{compressed.prompt_seconds:.2f} s"),
        ("decoding", _rate(dense), _rate(compressed)),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{a}</td><td>{b}</td></tr>" for name, a, b in rows)
    head = "<tr><th></th><th>DynamicCache</th><th>DiffKV</th></tr>"
    last = f'<tr><th>agreement</th><td colspan="2">{_agreement(result)}</td></tr>'
    share = compressed.cache_bytes / whole
    big = f'<p class="big"><b>{share:.0%}</b> of the memory</p>'
    return f'{big}<table class="figures">{head}{body}{last}</table>'


def _bytes(count: int, whole: int, colour: str) -> str:
    share = count / whole
    bar = f'<div class="bar" style="width:{min(1, share):.1%};background:{colour}"></div>'
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


def difference(result: Result) -> str:
    """Both texts in one: what only DynamicCache wrote struck out, what only DiffKV wrote coloured."""
    texts = [re.split(r"(\s+)", side.text) for side in (result.dense, result.compressed)]
    if texts[0] == texts[1]:
        return ""
    parts = []
    for kind, i, j, k, m in SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        dense, compressed = escape("".join(texts[0][i:j])), escape("".join(texts[1][k:m]))
        if kind == "equal":
            parts.append(dense)
            continue
        parts += [f"<del>{dense}</del>"] if dense else []
        parts += [f"<ins>{compressed}</ins>"] if compressed else []
    return f'<h4>What DiffKV wrote instead</h4><div class="difference">{"".join(parts)}</div>'


def coloured_text(result: Result | None, layer_idx: int, head: int) -> str:
    """The text of a run with every token in the colour of its level in one layer and KV head."""
    if result is None:
        return message("Generate first; the prompt then appears here, every token in the colour of its level.")
    levels = result.levels[layer_idx]
    if head >= levels.shape[0]:
        return message(f"Layer {layer_idx} has {levels.shape[0]} KV heads; choose one of them.", error=True)
    place = f"layer {layer_idx}, KV head {head}"
    return ColouredText(result.pieces, level_counts(levels[head : head + 1]), place, result.prompt_tokens).html()
