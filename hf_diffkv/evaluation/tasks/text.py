"""Tasks on real text: a compressed prompt, then its continuation in one forward or a long generation."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable
from typing import Any

import torch

from ..comparison import compare_logits
from ..errors import EvaluationError
from ..session import Session
from . import task
from .base import KL, PERPLEXITY, TOP1, Document, Metric, Source, Sums, Task
from .prompts import rng_for

CONTINUED = 256
# steps of a generation, and parts whose KL is also reported
STEPS, QUARTERS = 200, 4
BY_QUARTER = tuple(Metric(f"kl_{part}", f"KL, quarter {part}", False, digits=4) for part in range(1, QUARTERS + 1))
# remedy for a text that is too short
REMEDY = "lower --length or --documents, or give a longer text if you choose it"
# minimum characters of a topic used as a text
LONG_TOPIC = 4000


def texts() -> list[str]:
    """Returns chapters of Python's language reference, which ships with every Python."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics) if len(topics[name]) >= LONG_TOPIC]


def shuffled(source: Source, name: str) -> list[str]:
    """Returns these chapters shuffled by the seed and the task."""
    chapters = texts()
    rng_for(source, name, 0).shuffle(chapters)
    return chapters[::-1]


def stretches(
    pieces: Iterable[str], tokenizer: Any, count: int, length: int, continued: int, remedy: str = REMEDY
) -> list[Document]:
    """Cuts the joined pieces into consecutive documents.

    Args:
        pieces: texts, read only as far as needed.
        length, continued: number of tokens of each prompt, and of its continuation.
        remedy: advice in the error for a text that is too short.

    Raises:
        EvaluationError: the pieces have too few tokens.
    """
    start = tuple(tokenizer("").input_ids)
    size = length - len(start) + continued
    ids: list[int] = []
    found: list[Document] = []
    for piece in pieces:
        # a piece may exceed the model's maximum length, which the tokenizer would warn about
        ids += tokenizer(piece + "\n\n", add_special_tokens=False, verbose=False).input_ids
        while len(ids) >= size and len(found) < count:
            prompt, rest = (*start, *ids[: size - continued]), tuple(ids[size - continued : size])
            found.append(Document(f"text-{len(found)}", prompt, continuation=rest))
            ids = ids[size:]
        if len(found) == count:
            return found
    needed = f"{count} documents need" if count > 1 else "one document needs"
    raise EvaluationError(f"the text has {len(found) * size + len(ids)} tokens and {needed} {count * size}; {remedy}.")


@task("text")
class TextTask(Task):
    """KL, top-1 agreement and perplexity over `CONTINUED` tokens after the prompt."""

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


@task("trajectory")
class Trajectory(Task):
    """KL, top-1 agreement and perplexity along tokens that the dense cache samples, one token at a time."""

    metrics = (KL, TOP1, PERPLEXITY, *BY_QUARTER)
    count = 1
    length = 1000

    def documents(self, source: Source) -> list[Document]:
        steps = source.max_new_tokens or STEPS
        found = stretches(shuffled(source, "trajectory"), source.tokenizer, source.count, source.length, 0)
        extra = {"steps": steps, "seed": source.seed, "more_tokens": steps}
        return [Document(f"trajectory-{index}", document.context, extra=extra) for index, document in enumerate(found)]

    def measure(self, session: Session, document: Document, reference: Any) -> tuple[Sums, Any, dict[str, Any]]:
        steps = document.extra["steps"]
        generator = torch.Generator().manual_seed(document.extra["seed"])
        logits = [session.forward(document.context)[-1]]
        ids: list[int] = [] if reference is None else reference["ids"]
        for step in range(steps):
            if reference is None:
                # greedy decoding falls into loops, which are uninformative
                ids.append(int(torch.multinomial(logits[-1].float().softmax(-1).cpu(), 1, generator=generator)))
            logits.append(session.forward([ids[step]])[-1])
        held = session.held()
        written = torch.stack(logits[:-1])
        dense = written if reference is None else reference["logits"]
        sums = compare_logits(written, dense, ids)
        for index, metric in enumerate(BY_QUARTER):
            part = slice(index * steps // QUARTERS, (index + 1) * steps // QUARTERS)
            sums[metric.name] = compare_logits(written[part], dense[part], ids[part])["kl"]
        return sums, {"ids": ids, "logits": written}, {"held": held}
