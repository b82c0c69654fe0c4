"""RULER's tasks: every answer follows from the text alone, and texts are as long as asked for."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from small_chat_models import byte_tokenizer
from transformers import PreTrainedTokenizerFast

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.tasks import get_task, suites
from hf_diffkv.evaluation.tasks.base import Document, Source

GENERATED = suites()["ruler"]
NEEDLE = re.compile(r"Among the magic (\w+), that of ([\w-]+) is: ([\w-]+)\.")
# at one token per byte texts need more of them than at a token per word
LENGTHS = (2000, 6000)


@pytest.fixture(scope="module", params=["plain", "instruct"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return byte_tokenizer(request.param)


def made(name: str, tokenizer: Any, length: int, count: int = 1, seed: int = 0) -> list[tuple[Document, str, str]]:
    """Documents with the texts of their contexts and questions."""
    documents = get_task(name).documents(Source(tokenizer, count, length, seed))
    assert len(documents) == count
    return [(d, tokenizer.decode(d.context), tokenizer.decode(d.questions[0][0])) for d in documents]


def test_there_are_eleven() -> None:
    assert len(GENERATED) == 11


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.sampled(6)
def test_length_and_score(name: str, tokenizer: Any, length: int) -> None:
    task = get_task(name)
    for document, context, question in made(name, tokenizer, length, count=2):
        size = len(document.context) + len(document.questions[0][0])
        assert size <= length
        assert document.tokens == size + task.max_new_tokens
        # what takes most room is a line of noise or a sentence of 300 characters
        assert size > length - 330
        expected = document.extra["expected"]
        assert all(item in context and item not in question for item in expected)
        assert len(set(expected)) == len(expected)
        assert task.score_answer(" ".join(expected).upper(), document) == 1
        assert task.score_answer(expected[0], document) == pytest.approx(1 / len(expected))
        assert task.score_answer("", document) == 0


@pytest.mark.parametrize("name", GENERATED)
def test_documents_are_the_same_for_a_seed_and_differ_between_seeds(name: str) -> None:
    tokenizer = byte_tokenizer()
    first, second = ([d.digest for d, *_ in made(name, tokenizer, 2000, 2)] for _ in range(2))
    assert first == second and first[0] != first[1]
    assert made(name, tokenizer, 2000, 2, seed=1)[0][0].digest not in first


@pytest.mark.parametrize("name", GENERATED)
def test_too_short(name: str) -> None:
    with pytest.raises(EvaluationError, match=f"'{name}' does not fit into 60 tokens; raise --length"):
        made(name, byte_tokenizer(), 60)


@pytest.mark.parametrize(
    ("variant", "kind", "keys", "values", "queries"),
    [
        ("single-1", "numbers", 1, 1, 1),
        ("single-2", "numbers", 1, 1, 1),
        ("single-3", "uuids", 1, 1, 1),
        ("multikey-1", "numbers", 4, 1, 1),
        ("multikey-2", "numbers", None, 1, 1),
        ("multikey-3", "uuids", None, 1, 1),
        ("multivalue", "numbers", 1, 4, 1),
        ("multiquery", "numbers", 4, 1, 4),
    ],
)
@pytest.mark.sampled(6)
def test_needles(variant: str, kind: str, keys: int | None, values: int, queries: int, tokenizer: Any) -> None:
    for document, context, question in made(f"ruler-niah-{variant}", tokenizer, 4000, 2):
        needles = NEEDLE.findall(context)
        assert {found for found, _, _ in needles} == {kind}
        found: dict[str, list[str]] = {}
        for _, key, value in needles:
            found.setdefault(key, []).append(value)
        # nothing but needles: as many as fit
        assert len(found) == keys if keys else len(found) > 15
        assert {len(of_key) for of_key in found.values()} == {values}
        asked = [key for key in found if key in question]
        assert len(asked) == queries
        assert sorted(document.extra["expected"]) == sorted(value for key in asked for value in found[key])
        if kind == "uuids":
            assert all(str(uuid.UUID(value)) == value for _, _, value in needles)
        else:
            assert all(len(value) == 7 and value.isdigit() for _, _, value in needles)


def test_needles_are_hidden_in_order_of_the_text() -> None:
    context = made("ruler-niah-single-1", byte_tokenizer(), 3000)[0][1]
    lines = context.split("\n")[1:]
    noise = Counter(lines)
    assert len(noise) == 2 and noise.most_common()[0][1] > 20
    # real text is not one line over and over
    sentences = made("ruler-niah-single-2", byte_tokenizer(), 3000)[0][1].split(". ")
    assert Counter(sentences).most_common()[0][1] < 5


def test_variables_follow_the_chain(tokenizer: Any) -> None:
    for document, context, question in made("ruler-variable-tracking", tokenizer, 2500, 3):
        example, text = context.split("List all of them.")
        for part, asked, answer in (
            (text, question, document.extra["expected"]),
            (example, text.split("\n")[1], text.split("namely: ")[1].split("\n")[0].split()),
        ):
            values: dict[str, str] = {}
            for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", part):
                # each variable gets its value before another one gets it from there
                values[name] = values.get(value, value)
            number = re.search(r"value (\d{5})", asked + part)[1]
            assert list(values) == answer and set(values.values()) == {number} and len(answer) == 5


class WordTokenizer:
    """A token per word, so that short prompts hold many."""

    chat_template = None

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        words = re.findall(r"\s*\S+|\s+$", text)
        return SimpleNamespace(input_ids=[self.words.setdefault(word, len(self.words)) for word in words])

    def decode(self, ids: tuple[int, ...]) -> str:
        words = list(self.words)
        return "".join(words[index] for index in ids)


@pytest.mark.parametrize(("length", "often", "seldom"), [(512, 3, 1), (1500, 6, 1), (5000, 30, 3)])
def test_common_words_by_counting(length: int, often: int, seldom: int) -> None:
    document, context, _ = made("ruler-common-words", WordTokenizer(), length)[0]
    text = context.split("are:")[1]
    listed = re.findall(r"(\d+)\. ([a-z]+)", text.split("remember those.")[1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert set(document.extra["expected"]) == {word for word, times in counts.items() if times == often}
    assert len(document.extra["expected"]) == 10
    assert set(counts.values()) == {often, seldom}


@pytest.mark.parametrize("length", LENGTHS)
def test_frequent_words_by_counting(length: int, tokenizer: Any) -> None:
    document, context, _ = made("ruler-frequent-words", tokenizer, length)[0]
    words = re.findall(r"\b[a-z]{6}\b|(?<= )\.\.\.(?= |$)", context.split("is in it.")[1])
    (first, _), *others = Counter(words).most_common()
    assert first == "..."
    assert [word for word, _ in others[:3]] == document.extra["expected"]
    # no tie behind the third, and counts as of the distribution
    assert others[2][1] > others[3][1]
    assert others[0][1] / others[2][1] == pytest.approx(4, rel=0.35)
