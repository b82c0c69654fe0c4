"""Real text: a prompt of it, compressed, then its continuation, teacher-forced in one forward."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable
from typing import Any

from ..comparison import compare_logits
from ..errors import EvaluationError
from ..session import Session
from . import task
from .base import KL, PERPLEXITY, TOP1, Document, Source, Sums, Task
from .prompts import rng_for

CONTINUED = 256
# a topic of fewer characters is hardly a text
LONG_TOPIC = 4000


def texts() -> list[str]:
    """Chapters of Python's language reference, which every Python brings along."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG_TOPIC]


def shuffled(source: Source, name: str) -> list[str]:
    """These chapters in an order that the seed and the task draw."""
    chapters = texts()
    rng_for(source, name, 0).shuffle(chapters)
    return chapters[::-1]


def stretches(pieces: Iterable[str], tokenizer: Any, count: int, length: int, continued: int) -> list[Document]:
    """Consecutive stretches of the joined pieces, as documents.

    Args:
        pieces: texts; no more are read than needed.
        count: how many documents.
        length, continued: tokens of each one's prompt and of what follows it.

    Raises:
        EvaluationError: the pieces end before.
    """
    start = tuple(tokenizer("").input_ids)
    size = length - len(start) + continued
    ids: list[int] = []
    found: list[Document] = []
    for piece in pieces:
        # may be longer than the model can take, of which the tokenizer would warn
        ids += tokenizer(piece + "\n\n", add_special_tokens=False, verbose=False).input_ids
        while len(ids) >= size and len(found) < count:
            prompt, rest = (*start, *ids[: size - continued]), tuple(ids[size - continued : size])
            found.append(Document(f"text-{len(found)}", prompt, continuation=rest))
            ids = ids[size:]
        if len(found) == count:
            return found
    raise EvaluationError(
        f"the text has {len(found) * size + len(ids)} tokens and {count} documents need {count * size}; lower --length "
        "or --documents, or give a longer text where you choose it."
    )


@task("text")
class Text(Task):
    """KL, top-1 agreement and perplexity of `CONTINUED` tokens behind the prompt."""

    metrics = (KL, TOP1, PERPLEXITY)
    length = 2000

    def documents(self, source: Source) -> list[Document]:
        return stretches(shuffled(source, "text"), source.tokenizer, source.count, source.length, CONTINUED)

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        # the logits of the prompt's last token are exact for every method
        session.forward(document.context)
        held = session.held()
        ids = document.continuation
        logits = session.forward(ids[:-1], keep=len(ids) - 1)
        sums = compare_logits(logits, logits if reference is None else reference, ids[1:])
        return sums, logits, {"held": held}
