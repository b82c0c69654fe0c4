"""LongBench's English tasks (Bai et al., 2024): questions about long texts, summaries, examples to follow, code.

Prompts have LongBench's form, an order, the text, the order again with the question, in this package's words; the text
is in the cache, and compressed, before the question comes. A text that is too long for the model, or for `--length`,
loses its middle, as in LongBench. ROUGE-L is that of whole texts.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import EvaluationError
from ..scoring.overlap import f1, rouge_l, similarity
from . import task
from .base import Document, Source
from .chat import Prompt
from .hub import HubTask, Row


def class_named(text: str, expected: str, classes: list[str]) -> float:
    """1 over the number of classes that `text` names, where the expected one is among them."""
    named = [name for name in classes if name in text and not (name in expected and name != expected)]
    return 1 / len(named) if expected in named else 0.0


def number_given(text: str, expected: str) -> float:
    """The share of the numbers in `text` that are the number in `expected`."""
    numbers, right = re.findall(r"\d+", text), re.search(r"\d+", expected)[0]
    return numbers.count(right) / len(numbers) if numbers else 0.0


def line_of_code(text: str, expected: str) -> float:
    """Similarity of the first line that is neither a comment nor a fence."""
    lines = (line for line in text.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return similarity(next(lines, ""), expected)


def without_middle(ids: tuple[int, ...], room: int) -> tuple[int, ...]:
    """`ids`, or as many of them from both ends as there is `room` for."""
    if len(ids) <= room:
        return ids
    first = room // 2
    return ids[:first] + ids[len(ids) - (room - first) :]


@dataclass(frozen=True)
class Kind:
    """One data set of LongBench.

    Attributes:
        opening: before the text.
        order: behind it; none where the text is examples, or code.
        ask: the question and what the answer begins with, from the row's `input`.
        max_new_tokens: as in LongBench.
        score: of an answer and one that is expected.
        chat: whether a chat template is used; LongBench has none for examples that are to be followed, and code.
        one_line: whether what follows the first line does not count.
    """

    opening: str
    order: str
    ask: str
    max_new_tokens: int
    score: Callable[[str, str], float]
    chat: bool = True
    one_line: bool = False


SHORT = "Answer the question about {} in as few words as you can, without an explanation."
PASSAGES = Kind("These are passages.\n", SHORT.format("the passages"), "Question: {}\nAnswer:", 32, f1)
REPORT = "Write a summary of {} that fills a page."
KINDS = {
    "qasper": Kind(
        "This is a scientific article.\n\n",
        f'{SHORT.format("the article")} Write "unanswerable" if the article does not tell, and "yes" or "no" to a '
        "question that can be answered so.",
        "Question: {}\n\nAnswer:",
        128,
        f1,
    ),
    "multifieldqa_en": Kind("This is a text.\n\n", SHORT.format("the text"), "Question: {}\nAnswer:", 64, f1),
    "hotpotqa": PASSAGES,
    "2wikimqa": PASSAGES,
    "musique": PASSAGES,
    "narrativeqa": Kind("This is a story.\n\n", SHORT.format("the story"), "Question: {}\n\nAnswer:", 128, f1),
    "gov_report": Kind("This is a report.\n\n", REPORT.format("the report"), "Summary:", 512, rouge_l),
    "multi_news": Kind("These are news.\n\n", REPORT.format("all the news"), "Summary:", 512, rouge_l),
    "qmsum": Kind(
        "This is the transcript of a meeting.\n\n",
        "Answer the query about the meeting in one sentence or a few.",
        "Query: {}\nAnswer:",
        512,
        rouge_l,
    ),
    "trec": Kind(
        "Tell the type of the last question. The others are examples.\n\n", "", "{}", 64, f1, chat=False, one_line=True
    ),
    "triviaqa": Kind(
        "Answer the last question by its passage, with the answer alone. The others are examples.\n\n",
        "",
        "{}",
        32,
        f1,
        chat=False,
        one_line=True,
    ),
    "samsum": Kind(
        "Summarise the last dialogue in a few short sentences. The others are examples.\n\n",
        "",
        "{}",
        128,
        rouge_l,
        chat=False,
        one_line=True,
    ),
    "passage_count": Kind(
        "These are paragraphs, some of them more than once.\n\n",
        "How many different paragraphs are there? Write the number alone.",
        "The number is:",
        32,
        number_given,
    ),
    "passage_retrieval_en": Kind(
        "These are 30 paragraphs.\n\n",
        "Which paragraph is this a summary of? Write its number as in: Paragraph 7.",
        "{}\n\nThe answer is:",
        32,
        number_given,
    ),
    "lcc": Kind("Go on with this code by one line.\n", "", "Next line of code:\n", 64, line_of_code, chat=False),
    "repobench-p": Kind(
        "Go on with this code by one line.\n", "", "{}Next line of code:\n", 64, line_of_code, chat=False
    ),
}


class LongBench(HubTask):
    """One data set of LongBench."""

    suites = ("hub", "longbench")
    repository = "Xnhyacinth/LongBench"
    columns = ("context", "input", "answers", "all_classes")

    def __init__(self, data: str) -> None:
        self.kind, self.configs = KINDS[data], (data,)
        self.max_new_tokens = self.kind.max_new_tokens

    def prompt(self, row: Row, rng: random.Random) -> tuple[Prompt, Any]:
        kind = self.kind
        asked = kind.ask.replace("{}", row["input"])
        if kind.order:
            asked = f"\n\n{kind.order}\n\n{asked}"
        elif kind.one_line:
            asked = f"\n\n{asked}"
        prompt = Prompt(asked, context=kind.opening + row["context"], chat=kind.chat)
        return prompt, {"answers": list(row["answers"]), "classes": row["all_classes"]}

    def document(self, source: Source, name: str, prompt: Prompt, expected: Any) -> Document:
        document = super().document(source, name, prompt, expected)
        limits = [source.length, source.limit and source.limit - document.extra["more_tokens"]]
        room = min((limit for limit in limits if limit is not None), default=None)
        if room is None:
            return document
        room -= len(document.questions[0][0])
        if room < 2:
            raise EvaluationError(
                f"task {self.name!r}: no room for the text; raise --length or lower --max-new-tokens."
            )
        return dataclasses.replace(document, context=without_middle(document.context, room))

    def score_answer(self, text: str, document: Document) -> float:
        if self.kind.one_line:
            text = text.lstrip("\n").split("\n")[0]
        expected = document.extra["expected"]
        if expected["classes"]:
            return max(class_named(text, answer, expected["classes"]) for answer in expected["answers"])
        return max(self.kind.score(text, answer) for answer in expected["answers"])


for data in KINDS:
    task(f"longbench-{data.replace('_', '-')}")(functools.partial(LongBench, data))
