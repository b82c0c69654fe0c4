"""Prompts as the users of a model write them: by its chat template, or as plain text where it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .prompts import encode

THINK, END_OF_THOUGHT = "<think>", "</think>"
# a character for private use, which no template changes
MARK = "\ue000"


@dataclass(frozen=True)
class Tokens:
    """Token ids of a prompt.

    Attributes:
        context: what is in the cache before the question comes; empty where all comes at once.
        question: the rest.
        chat: whether they follow a chat template.
        thinking: whether they end inside of a thought, so that the model writes the rest of it.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    chat: bool
    thinking: bool


@dataclass(frozen=True)
class Prompt:
    """What a user says.

    Attributes:
        question: text behind the context, or all there is.
        context: text that comes first and is compressed before the question is known.
        cue: what ends a plain prompt, in the place of the header that a template begins the answer with.
        lead: how the answer begins; the model goes on from there.
        chat: whether a chat template is used where there is one.
        plain: a prompt without a chat template, where it is not `question` and `cue`.
    """

    question: str
    context: str = ""
    cue: str = ""
    lead: str = ""
    chat: bool = True
    plain: str = ""

    def encode(self, tokenizer: Any, thinks: bool) -> Tokens:
        """Token ids; a thinking model gets no room to think unless it `thinks`."""
        chat = self.chat and bool(getattr(tokenizer, "chat_template", None))
        text = f"{self.context}{MARK}{self.question}"
        if not chat and self.plain:
            text = MARK + self.plain
        elif chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=thinks
            )
        else:
            text += self.cue
        thinking = chat and text.rstrip().endswith(THINK)
        if thinking and not thinks:
            text += f"\n{END_OF_THOUGHT}\n\n"
            thinking = False
        before, _, after = text.partition(MARK)
        after += self.lead
        if not self.context:
            before, after = "", before + after
        first, *rest = (part for part in (before, after) if part)
        # a template brings the special tokens along
        ids = encode(tokenizer, first) if chat else tuple(tokenizer(first).input_ids)
        if not rest:
            return Tokens((), ids, chat, thinking)
        return Tokens(ids, encode(tokenizer, rest[0]), chat, thinking)


def spoken(text: str, thinking: bool) -> str:
    """`text` without what a thinking model thought; nothing where it has not come to an end of thinking.

    Args:
        thinking: whether `text` begins inside of a thought.
    """
    _, end, answer = text.rpartition(END_OF_THOUGHT)
    if end:
        return answer.strip()
    return "" if thinking or text.lstrip().startswith(THINK) else text
