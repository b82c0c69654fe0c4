"""User messages as the text that a chat model reads, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ANSWER = "(answer)"


def chat_turns(tokenizer: Any, messages: Sequence[str]) -> list[str]:
    """What is to be appended before each answer: the first message with all that the template puts around it, then
    the end of the answer before and the next message.

    Special tokens are written out, so the text is to be tokenised without adding any.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show every answer as it is.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; only models that were trained to chat have one.")
    first = [{"role": "user", "content": messages[0]}]
    turns = [tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=False)]
    for message in messages[1:]:
        talk = [*first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        before, found, after = text.removeprefix(turns[0]).partition(ANSWER)
        if before or not found:
            raise ValueError("the chat template changes what stands before an answer; it takes single turns only.")
        turns.append(after)
    return turns
