"""HTML for messages, the cost of both runs, and the differences between their texts."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from html import escape

from .generation import CacheRun, Result


def message(text: str, error: bool = False, done: float | None = None) -> str:
    """Returns a status line, with a bar if a share of the work is `done`. Screen readers announce it."""
    bar = "" if done is None else f'<div class="bar" aria-hidden="true"><i style="width:{done:.1%}"></i></div>'
    return f'<div class="message" role="{"alert" if error else "status"}">{escape(text)}{bar}</div>'


def figures(result: Result, setting: str) -> str:
    """Returns the share of the memory as one number, then bytes, speed and agreement."""
    dense, compressed, memory = result.dense, result.compressed, result.memory
    most = max(1, dense.cache_bytes)
    big = f'<p class="big"><b>{compressed.cache_bytes / most:.0%}</b> of the memory</p>'
    notes = [f"setting {setting}", f"{len(result.pieces):,} tokens in the cache"]
    if len(memory.layers) < memory.num_layers:
        notes.append(f"{len(memory.layers)} of {memory.num_layers} layers compressed")
    if memory.hint:
        notes.append(memory.hint)
    rows = [
        ("holds", _bytes(dense.cache_bytes), f"{_bytes(compressed.cache_bytes)} ({compressed.cache_bytes / most:.1%})"),
        ("payload", "", f"{_bytes(memory.payload_bytes)} ({memory.payload_bytes / most:.1%})"),
        ("prompt", f"{dense.prompt_seconds:.2f} s", f"{compressed.prompt_seconds:.2f} s"),
        ("decoding", _rate(dense), _rate(compressed)),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{a}</td><td>{b}</td></tr>" for name, a, b in rows)
    head = "<tr><th></th><th>DynamicCache</th><th>DiffKV</th></tr>"
    table = f'<table class="figures">{head}{body}</table>'
    return f'{big}<p class="note">{escape("; ".join(notes))}</p>{table}<p class="note">{_agreement(result)}</p>'


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def _rate(side: CacheRun) -> str:
    rate = side.tokens_per_second
    return "-" if rate is None else f"{rate:.1f} tokens/s"


def _agreement(result: Result) -> str:
    found = result.agreement
    if found.until_difference == found.tokens:
        return f"All {found.tokens} generated tokens are equal."
    return f"The generated tokens are equal up to the first difference, at token {found.until_difference + 1}."


def difference(result: Result) -> str:
    """Returns both texts in one: words only from DynamicCache struck out, words only from DiffKV coloured."""
    words, others = (re.split(r"(\s+)", side.text) for side in (result.dense, result.compressed))
    if words == others:
        return ""
    parts = []
    for kind, i, j, k, m in SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        dense, compressed = escape("".join(words[i:j])), escape("".join(others[k:m]))
        if kind == "equal":
            parts.append(dense)
            continue
        parts += [f"<del>{dense}</del>"] if dense else []
        parts += [f"<ins>{compressed}</ins>"] if compressed else []
    return f'<h4>What DiffKV wrote instead</h4><div class="difference">{"".join(parts)}</div>'
