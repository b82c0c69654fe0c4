"""Parts of a text that its tokens stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


def pieces_of_text(tokenizer: Any, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[str]]:
    """Tokenizes a text; returns the ids and the part of the text that each token covers.

    The parts add up to the text. A character that spans several tokens is assigned to one of them. Slow tokenizers,
    which give no offsets, decode each token instead.

    Args:
        add_special_tokens: False if the text already contains them, as with chat templates.
    """
    encoded = tokenizer(
        text, return_offsets_mapping=tokenizer.is_fast, add_special_tokens=add_special_tokens, verbose=False
    )
    ids = encoded["input_ids"]
    if not tokenizer.is_fast:
        return ids, pieces_of_ids(tokenizer, ids)
    parts, start = [], 0
    for _, end in encoded["offset_mapping"]:
        parts.append(text[start : max(start, end)])
        start = max(start, end)
    return ids, parts


def pieces_of_ids(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
    """Returns the text that each token adds. A character of several tokens goes to the last of them."""
    parts = []
    # the text of a token may depend on the piece before it
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[before:start], skip_special_tokens=skip_special_tokens)
        text = tokenizer.decode(ids[before:end], skip_special_tokens=skip_special_tokens)
        if text.endswith(REPLACEMENT):
            parts.append("")
            continue
        parts.append(text[len(known) :])
        before, start = start, end
    return parts
