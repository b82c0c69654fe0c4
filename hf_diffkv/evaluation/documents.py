"""Documents of tasks. Importing this does not import PyTorch, which some methods' environments lack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Document:
    """A prompt with its questions or its continuation.

    Attributes:
        name: name, unique within the task.
        context: token ids of the prompt.
        questions: token ids of each question and of its answer, for tasks that ask.
        continuation: token ids that follow the prompt, for tasks that continue it.
        extra: further data of the task, ready for JSON.
    """

    name: str
    context: tuple[int, ...]
    questions: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    continuation: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Maximum number of the document's tokens that a cache sees."""
        longest = max((len(q) + len(a) for q, a in self.questions), default=0)
        return len(self.context) + max(longest, len(self.continuation)) + self.extra.get("more_tokens", 0)

    @property
    def digest(self) -> str:
        """Digest of the content, which differs between tokenizers, for example; 16 hexadecimal digits."""
        content = json.dumps([self.context, self.questions, self.continuation, self.extra], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_document(fields: Mapping[str, Any]) -> Document:
    """Makes a document from its fields as read from JSON."""
    questions = tuple((tuple(question), tuple(answer)) for question, answer in fields["questions"])
    known = {"questions": questions, **{name: tuple(fields[name]) for name in ("context", "continuation")}}
    return Document(**{**fields, **known})
