"""Real text: a prompt of it, compressed, then its continuation, teacher-forced in one forward."""

from __future__ import annotations

import pydoc_data.topics
from typing import Any

from ..comparison import compare_logits
from ..errors import EvaluationError
from ..session import Session
from . import task
from .base import KL, PERPLEXITY, TOP1, Document, Source, Sums, Task
from .prompts import rng_for

CONTINUED = 256
# a topic of fewer characters is not continued for long
LONG_TOPIC = 4000


def texts() -> list[str]:
    """Chapters of Python's language reference, which every Python brings along."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG_TOPIC]


def passages(source: Source, name: str, continued: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """`source.count` stretches of real text: token ids of the prompt and of what follows it."""
    chapters = texts()
    found = []
    for index in range(source.count):
        rng = rng_for(source, name, index)
        rng.shuffle(chapters)
        ids = source.tokenizer("\n\n".join(chapters[:12])).input_ids
        if len(ids) < source.length + continued:
            ids = source.tokenizer("\n\n".join(chapters)).input_ids
        if len(ids) < source.length + continued:
            raise EvaluationError(f"the text has {len(ids)} tokens; lower --length to {len(ids) - continued}.")
        found.append((tuple(ids[: source.length]), tuple(ids[source.length : source.length + continued])))
    return found


@task("text")
class Text(Task):
    """KL, top-1 agreement and perplexity of `CONTINUED` tokens behind the prompt."""

    metrics = (KL, TOP1, PERPLEXITY)
    length = 2000

    def documents(self, source: Source) -> list[Document]:
        return [
            Document(f"text-{index}", context, continuation=continuation)
            for index, (context, continuation) in enumerate(passages(source, "text", CONTINUED))
        ]

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        # the logits of the prompt's last token are exact for every method
        session.forward(document.context)
        held = session.held()
        ids = document.continuation
        logits = session.forward(ids[:-1], keep=len(ids) - 1)
        sums = compare_logits(logits, logits if reference is None else reference, ids[1:])
        return sums, logits, {"held": held}
