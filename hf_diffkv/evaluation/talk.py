"""Turns of a talk: user messages as the text that a chat model reads, and a model that answers them on one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..compat import passing

ANSWER = "(answer)"


def chat_turns(tokenizer: Any, messages: Sequence[str], system: str | None = None) -> list[str]:
    """What is to be appended before each answer: the first message with all that the template puts around it, then
    the end of the answer before and the next message.

    Special tokens are written out, so the text is to be tokenised without adding any.

    Args:
        system: the system message that goes first; None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show every answer as it is.
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
            raise ValueError("the chat template changes what stands before an answer; it takes single turns only.")
        turns.append(after)
    return turns


class Talk:
    """A model that goes on from one cache, turn by turn.

    Args:
        cache: an empty cache, or one that has seen all of `ids` but the last.
        chat: whether turns are messages, to be set by the tokenizer's chat template, or text to be continued as it is.
        system: of a chat, see `chat_turns`.
        ids: token ids to go on from.
        first: with `ids`, the message they began with.
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
        """Token ids that the turn `text` appends. Raises `ValueError` as `chat_turns`."""
        if not self.chat:
            return self.tokenizer(text, add_special_tokens=not self.ids.numel()).input_ids
        messages = [text] if self.first is None else [self.first, text]
        turn = chat_turns(self.tokenizer, messages, self.system)[-1]
        added = self.tokenizer(turn, add_special_tokens=False).input_ids
        # the model may have ended its answer by itself
        ended = self.ids.numel() and added and int(self.ids[0, -1]) == added[0]
        return added[1:] if ended else added

    def answer(self, text: str, **options: Any) -> list[int]:
        """Token ids that the model writes behind the turn `text`.

        Args:
            options: of `generate()`.

        Raises:
            ValueError: as `chat_turns`; nothing has changed then.
        """
        added = torch.tensor([self.encode(text)], dtype=torch.int64, device=self.ids.device)
        self.first = text if self.first is None else self.first
        ids = torch.cat([self.ids, added], dim=1)
        written = self.model.generate(ids, attention_mask=torch.ones_like(ids), **passing(self.cache), **options)
        self.ids = written
        return written[0, ids.shape[1] :].tolist()

    def reset(self) -> None:
        """Forgets everything that was said."""
        self.cache.reset()
        self.ids, self.first = self.ids[:, :0], None
