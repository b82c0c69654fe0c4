"""Conversations: turns as the text that a chat model reads, and a model that answers them on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..compat import passing

ANSWER = "(answer)"


def chat_turns(tokenizer: Any, messages: Sequence[str], system: str | None = None) -> list[str]:
    """Returns the text to append before each answer.

    The first text is the first message with all that the template adds; each later one is the end of the previous
    answer and the next message.

    Special tokens are written out, so the text must be tokenised without adding any.

    Args:
        system: system message that comes first; None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show every answer unchanged.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; only models that were trained to chat have one.")
    first = [] if system is None else [{"role": "system", "content": system}]
    first = [*first, {"role": "user", "content": messages[0]}]
    turns = [tokenizer.apply_chat_template(first, add_generation_prompt=True, tokenize=False)]
    for message in messages[1:]:
        talk = [*first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        before, found, after = text.removeprefix(turns[0]).partition(ANSWER)
        if before or not found:
            raise ValueError("the chat template changes the text before an answer; it supports single turns only.")
        turns.append(after)
    return turns


class Talk:
    """A conversation with a model on one cache, turn by turn.

    Args:
        cache: empty cache, or one that has seen all of `ids` except the last.
        chat: whether turns are messages for the tokenizer's chat template, instead of text to continue.
        system: system message of a chat (`chat_turns`).
        ids: token ids to continue from.
        first: message with which `ids` begin.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: Any,
        *,
        chat: bool = False,
        system: str | None = None,
        ids: Sequence[int] = (),
        first: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.chat, self.system, self.first = chat, system, first
        self.ids = torch.tensor([list(ids)], dtype=torch.int64, device=model.device)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids that the turn `text` appends. Raises `ValueError` like `chat_turns`."""
        if not self.chat:
            return self.tokenizer(text, add_special_tokens=not self.ids.numel()).input_ids
        messages = [text] if self.first is None else [self.first, text]
        turn = chat_turns(self.tokenizer, messages, self.system)[-1]
        added = self.tokenizer(turn, add_special_tokens=False).input_ids
        # the model may have ended its answer itself
        ended = self.ids.numel() and added and int(self.ids[0, -1]) == added[0]
        return added[1:] if ended else added

    def answer(self, text: str, **options: Any) -> list[int]:
        """Returns the token ids that the model generates after the turn `text`.

        After an error, the conversation is unchanged, but it cannot continue if the cache `is_ahead` of it.

        Raises:
            ValueError: raised by `chat_turns`, or by `generate()`.
            MemoryError: the turn or its answer does not fit.
        """
        added = torch.tensor([self.encode(text)], dtype=torch.int64, device=self.ids.device)
        ids = torch.cat([self.ids, added], dim=1)
        written = self.model.generate(ids, attention_mask=torch.ones_like(ids), **passing(self.cache), **options)
        self.first = text if self.first is None else self.first
        self.ids = written
        return written[0, ids.shape[1] :].tolist()

    @property
    def is_ahead(self) -> bool:
        """Whether the cache holds tokens of an answer that an error cut off, so that only `reset` helps."""
        return self.cache.get_seq_length() > max(0, self.ids.shape[1] - 1)

    def reset(self) -> None:
        """Forgets the conversation and empties the cache."""
        self.cache.reset()
        self.ids, self.first = self.ids[:, :0], None
