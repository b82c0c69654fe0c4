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
# a topic of fewer characters is hardly a text
LONG_TOPIC = 4000


def texts() -> list[str]:
    """Chapters of Python's language reference, which every Python brings along."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG_TOPIC]


def passages(source: Source, name: str, continued: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """`source.count` stretches of real text that do not overlap: token ids of the prompt and of what follows it."""
    chapters = texts()
    rng_for(source, name, 0).shuffle(chapters)
    start = tuple(source.tokenizer("").input_ids)
    size = source.length + continued - len(start)
    ids: list[int] = []
    while chapters and len(ids) < source.count * size:
        # may be longer than the model can take, of which the tokenizer would warn
        ids += source.tokenizer(chapters.pop() + "\n\n", add_special_tokens=False, verbose=False).input_ids
    if len(ids) < source.count * size:
        raise EvaluationError(
            f"the text has {len(ids)} tokens and {source.count} documents need {source.count * size}; lower --length "
            "or --documents."
        )
    stretches = [(*start, *ids[index * size : (index + 1) * size]) for index in range(source.count)]
    return [(stretch[: source.length], stretch[source.length :]) for stretch in stretches]


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
