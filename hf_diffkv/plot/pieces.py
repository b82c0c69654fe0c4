"""The text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"


def pieces_of_text(tokenizer: Any, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[str]]:
    """Ids of a text's tokens, and the part of the text that each stands for, so that the parts make up the text.

    A character of several tokens stands with one of them. Tokenizers that do not know where their tokens stand in the
    text are asked for the text of each.

    Args:
        add_special_tokens: False where the text has them written out, as chat templates do.
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
    """Text that each token adds to that of those before it. A character of several tokens stands with the last one."""
    parts = []
    # what a token reads like may depend on the piece before it
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
