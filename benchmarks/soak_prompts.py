"""Prompts of a soak and the answers of `generate()`. Lengths are mixed, and some prompts share a prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

NAMES = ("sky", "tin", "jar", "hen", "red", "fox", "oak", "elm", "yew", "ice", "owl", "bay")
# between the two most likely tokens; if their scores are closer, the order of summation may decide
MARGIN = 1e-3
TEMPLATE = (
    "{% for message in messages %}@{{ message.role }}={{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)


@dataclass(frozen=True)
class Prompt:
    """A question with its answer.

    Attributes:
        chat: whether the text is sent as a chat message or as a plain prompt.
        prompt_tokens: number of tokens of the prompt.
        answer: generated token ids, up to an end of text.
    """

    text: str
    chat: bool
    prompt_tokens: int
    answer: tuple[int, ...]


class Reference:
    """Transformers' own `generate()`, in float32."""

    def __init__(self, model: Any, tokenizer: Any, new_tokens: int) -> None:
        self._model, self.tokenizer, self._new = model, tokenizer, new_tokens
        self.ends = {model.generation_config.eos_token_id}

    def prompt(self, text: str, chat: bool) -> Prompt | None:
        """Returns a prompt with its answer, or None if the scores of a token's two best candidates are too close."""
        if chat:
            messages = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(text).input_ids
        options = {"max_new_tokens": self._new, "do_sample": False, "output_scores": True}
        found = self._model.generate(torch.tensor([ids]), return_dict_in_generate=True, **options)
        best = torch.stack(found.scores).topk(2, dim=-1).values[:, 0]
        if (best[:, 0] - best[:, 1]).min() < MARGIN:
            return None
        return Prompt(text, chat, len(ids), tuple(found.sequences[0, len(ids) :].tolist()))

    def answer(self, prompt: Prompt, new_tokens: int) -> tuple[str, str]:
        """Returns the text of an answer of at most `new_tokens` tokens and its finish reason."""
        ids = prompt.answer[:new_tokens]
        reason = "stop" if ids[-1] in self.ends else "length"
        return self.tokenizer.decode(ids, skip_special_tokens=True), reason


def make_prompts(reference: Reference, count: int, longest: int, rng: random.Random) -> list[Prompt]:
    """Makes `count` questions of up to about `longest` characters, a third of them about one of four documents."""
    documents = [_facts(rng, longest // 2) for _ in range(4)]
    found: list[Prompt] = []
    while len(found) < count:
        kind = len(found) % 3
        size = int(longest ** rng.uniform(0.5, 1))
        text = rng.choice(documents) if kind == 0 else _facts(rng, size)
        if kind == 1 and found:
            # a further turn of a conversation
            last = rng.choice(found)
            if not last.chat and len(last.text) < longest // 2:
                text = last.text + reference.answer(last, 8)[0]
        prompt = reference.prompt(f"{text} ?{rng.choice(NAMES)}=", rng.random() < 0.4)
        if prompt is not None:
            found.append(prompt)
    return found


def _facts(rng: random.Random, size: int) -> str:
    """A text of about `size` characters."""
    return " ".join(f"@{rng.choice(NAMES)}={rng.randrange(1000, 10000)}" for _ in range(max(1, size // 10)))
