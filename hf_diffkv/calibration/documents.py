"""Documents on which a model's heads are measured: text, recall of facts, copying.

By default, `hf-diffkv evaluate` scores none of them, as facts use another seed and the text comes from topics of
Python's documentation outside the evaluation's chapters.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..evaluation.tasks import Document, get_task
from ..evaluation.tasks.base import Source
from ..evaluation.tasks.prompts import encode
from ..evaluation.tasks.text import stretches, texts

SEED = 20260
# tokens of a prompt, and of what follows it
DOCUMENT_LENGTH, FOLLOWING = 1200, 32
# minimum number of answer tokens that count, however long the questions are
LEAST_ANSWERED = 8
TEXT_COUNT, COPY_COUNT = 3, 1
RECALL = (("dictionary", 2), ("key-value", 1), ("passage", 1))
# length in characters at which a paragraph does not occur in two topics by chance
LONG_PARAGRAPH = 80
# tokens of a copy that identify the copied part
LEAD = 8
# key for the positions, among the following tokens, whose predictions count
POSITIONS = "positions"


def documents_for(tokenizer: Any, pieces: Iterable[str] | None = None, length: int = DOCUMENT_LENGTH) -> list[Document]:
    """Makes eight documents whose `continuation` follows the prompt; logits at `extra["positions"]` count.

    Args:
        pieces: pieces of running text; None uses Python's documentation.
        length: number of tokens of each prompt.

    Raises:
        ValueError: `tokenizer` is not a tokenizer.
        EvaluationError: the text is too short, or the length is too short for the facts.
    """
    check_tokenizer(tokenizer)
    pieces = short_topics() if pieces is None else pieces
    remedy = "lower --length, or give a longer text if you choose it"
    found = stretches(pieces, tokenizer, TEXT_COUNT + COPY_COUNT, length, FOLLOWING, remedy)
    texts = [_counting_at(document, range(FOLLOWING)) for document in found[:TEXT_COUNT]]
    copies = [copying(document, tokenizer, index) for index, document in enumerate(found[TEXT_COUNT:])]
    source = Source(tokenizer, 1, length, SEED)
    recall = [recalling(get_task(name).document(source, index)) for name, count in RECALL for index in range(count)]
    return [*texts, *recall, *copies]


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` unless `tokenizer` can be called with a text."""
    if not callable(tokenizer):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}; pass the tokenizer of the model.")


def digest_of(documents: Sequence[Document]) -> str:
    """Returns a digest of the documents' tokens, 16 hexadecimal digits."""
    return hashlib.sha256("".join(document.digest for document in documents).encode()).hexdigest()[:16]


def short_topics() -> list[str]:
    """Returns the topics of Python's documentation that the evaluation does not use, shuffled by `SEED`."""
    topics = pydoc_data.topics.topics
    scored = texts()
    chosen = [
        topics[name]
        for name in sorted(topics)
        if not any(part in chapter for part in _paragraphs(topics[name]) for chapter in scored)
    ]
    random.Random(f"{SEED}/topics").shuffle(chosen)
    return chosen


def _paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if len(part) >= LONG_PARAGRAPH]


def recalling(document: Document) -> Document:
    """Appends as many questions and answers as fit, up to the last prediction that counts; only answers count."""
    following: list[int] = []
    positions: list[int] = []
    for question, answer in document.questions:
        # position that predicts the answer's first token
        start = len(following) + len(question) - 1
        following += [*question, *answer]
        positions += range(start, start + len(answer))
    end = max(FOLLOWING, positions[LEAST_ANSWERED - 1] + 1)
    counted = [position for position in positions if position < end]
    continuation = tuple(following[: counted[-1] + 1])
    return _counting_at(replace(document, questions=(), continuation=continuation), counted)


def copying(document: Document, tokenizer: Any, index: int) -> Document:
    """Appends a repeated part of the text; predictions count once it is clear which part."""
    start = random.Random(f"{SEED}/copy/{index}").randrange(max(1, len(document.context) // 2))
    again = document.context[start : start + FOLLOWING]
    copied = replace(
        document, name=f"copy-{index}", context=(*document.context, *encode(tokenizer, "\n\n")), continuation=again
    )
    return _counting_at(copied, range(LEAD, len(again)))


def _counting_at(document: Document, positions: Iterable[int]) -> Document:
    return replace(document, extra={POSITIONS: list(positions)})
