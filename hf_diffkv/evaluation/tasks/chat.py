"""Prompts as the users of a model write them: by its chat template, or as plain text where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .prompts import encode

THINK, END_OF_THOUGHT = "<think>", "</think>"
# a character for private use, which no template changes
MARK = "\ue000"


@dataclass(frozen=True)
class ChatPrompt:
    """What a user says.

    Attributes:
        question: text behind the context, or all there is.
        context: text that comes first and is compressed before the question is known.
        cue: what ends a plain prompt, in the place of the header that a template begins the answer with.
        lead: how the answer begins; the model goes on from there.
    """

    question: str
    context: str = ""
    cue: str = ""
    lead: str = ""

    def encode(self, tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the context, none where there is none, and of the question; a model gets no room to think."""
        chat = bool(getattr(tokenizer, "chat_template", None))
        text = f"{self.context}{MARK}{self.question}"
        if chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            if text.rstrip().endswith(THINK):
                text += f"\n{END_OF_THOUGHT}\n\n"
        else:
            text += self.cue
        before, _, after = text.partition(MARK)
        after += self.lead
        if not self.context:
            before, after = "", before + after
        first, *rest = (part for part in (before, after) if part)
        # a template brings the special tokens along
        ids = encode(tokenizer, first) if chat else tuple(tokenizer(first).input_ids)
        return (ids, encode(tokenizer, rest[0])) if rest else ((), ids)


def spoken(text: str) -> str:
    """`text` without what a thinking model thought; nothing where it has not come to an end of thinking."""
    _, end, answer = text.rpartition(END_OF_THOUGHT)
    if end:
        return answer.strip()
    return "" if text.lstrip().startswith(THINK) else text
