"""Documents: the same ones for the same source, and what is asked for is said in the prompt."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from hf_diffkv.evaluation.errors import EvaluationError
from hf_diffkv.evaluation.runner import documents_of
from hf_diffkv.evaluation.tasks import TASKS, Document, get_task, suites
from hf_diffkv.evaluation.tasks.base import Source
from hf_diffkv.evaluation.tasks.text import texts

LENGTH = 1100
OFFLINE = suites()["offline"]
# tasks that hide facts, and what stands before and after the answer in a fact
FACTS = ["dictionary", "key-value", "passage", "turns", "updates"]


def documents(name: str, tokenizer: Any, count: int = 2, length: int = LENGTH, seed: int = 0) -> list[Document]:
    return get_task(name).documents(Source(tokenizer, count, length, seed))


@pytest.mark.parametrize("name", OFFLINE)
def test_independent_of_when_and_how_many(name: str, tokenizer: Any) -> None:
    three = documents(name, tokenizer, 3)
    # a task that has made other documents before
    used = get_task(name)
    used.documents(Source(tokenizer, 1, LENGTH + 100, 7))
    assert used.documents(Source(tokenizer, 2, LENGTH, 0)) == three[:2]
    assert len({document.name for document in three}) == len({document.digest for document in three}) == 3


@pytest.mark.parametrize("name", OFFLINE)
def test_seed_and_length_matter(name: str, tokenizer: Any) -> None:
    document = documents(name, tokenizer, 1)[0]
    assert documents(name, tokenizer, 1, seed=1)[0].digest != document.digest
    longer = documents(name, tokenizer, 1, length=LENGTH + 500)[0]
    assert longer.digest != document.digest
    assert LENGTH - 200 < len(document.context) <= LENGTH
    assert LENGTH + 300 < len(longer.context) <= LENGTH + 500


@pytest.mark.parametrize("name", OFFLINE)
def test_the_tasks_own_count_and_length(name: str, tokenizer: Any) -> None:
    task = get_task(name)
    made = documents_of(task, Source(tokenizer, 0))
    assert len(made) == task.count
    assert all(task.length - 200 < len(document.context) <= task.length for document in made)


@pytest.mark.parametrize("name", FACTS)
def test_every_answer_is_in_the_prompt(name: str, tokenizer: Any) -> None:
    for document in documents(name, tokenizer):
        prompt = tokenizer.decode(document.context)
        assert len(document.questions) >= 4
        for question, answer in document.questions:
            # the question ends with how the fact begins
            asked = re.split(r"word for word\. |[.\n] ?", tokenizer.decode(question))[-1]
            assert asked + tokenizer.decode(answer) in prompt
            assert not asked.endswith(" ")


def test_updates_ask_for_the_last_value(tokenizer: Any) -> None:
    for document in documents("updates", tokenizer):
        prompt = tokenizer.decode(document.context)
        for question, answer in document.questions:
            values = re.findall(re.escape(tokenizer.decode(question).strip()) + r" (\w+)\.", prompt)
            assert len(set(values)) == 3 and f" {values[-1]}." == tokenizer.decode(answer)


def test_turns_talk_between_the_questions(tokenizer: Any) -> None:
    document, plain = (documents(name, tokenizer, 1)[0] for name in ("turns", "dictionary"))
    assert len(document.questions) == len(plain.questions)
    assert min(len(question) for question, _ in document.questions) > 4 * len(plain.questions[0][0])
    # all of it stays in the cache
    asked = sum(len(question) + len(answer) for question, answer in document.questions)
    assert document.tokens == len(document.context) + asked


def test_questions_do_not_give_the_answer_away(tokenizer: Any) -> None:
    for name in FACTS:
        for document in documents(name, tokenizer):
            for question, answer in document.questions:
                assert tokenizer.decode(answer) not in tokenizer.decode(question)


def is_from_a_chapter(text: str) -> bool:
    """Also where one chapter ends and another begins."""
    # the tokenizer does not know all characters
    pattern = re.compile(re.escape(text).replace("<unk>", "."))
    return "\n\n" in text or any(pattern.search(chapter) for chapter in texts())


def test_stretches_of_text_follow_each_other(tokenizer: Any) -> None:
    pieces = []
    for document in documents("text", tokenizer, 4):
        assert len(document.context) == LENGTH and len(document.continuation) == 256
        pieces += [tokenizer.decode(document.context), tokenizer.decode(document.continuation)]
    for before, after in itertools.pairwise(pieces):
        assert is_from_a_chapter(before[-30:] + after[:30])
    # the text is another with each version of Python, and one pair may fit by chance
    assert not all(is_from_a_chapter(before[-30:] + after[:30]) for before, after in zip(pieces, pieces[2:]))


def test_text_starts_as_a_prompt_does(tokenizer: Any) -> None:
    def with_start(text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, **options)
        encoded["input_ids"] = [tokenizer.bos_token_id] * add_special_tokens + encoded["input_ids"]
        return encoded

    plain, started = documents("text", tokenizer, 2), documents("text", with_start, 2)
    assert [document.context[0] for document in started] == [tokenizer.bos_token_id] * 2
    assert [len(document.context) for document in started] == [LENGTH] * 2
    assert started[0].context[1:] == plain[0].context[:-1]
    assert started[1].context[1:20] == (*plain[0].continuation, *plain[1].context)[255 : 255 + 19]


def test_facts_that_do_not_fit(tokenizer: Any) -> None:
    with pytest.raises(EvaluationError, match="a prompt of 100 tokens is too short for 12 facts; raise --length"):
        documents("key-value", tokenizer, length=100)


def test_text_that_is_too_short(tokenizer: Any) -> None:
    with pytest.raises(EvaluationError, match="the text has .* tokens and 2 documents need .*; lower --length or"):
        documents("text", tokenizer, length=1_000_000)
    with pytest.raises(EvaluationError, match="the text has .* tokens and one document needs .*; lower --length or"):
        documents("text", tokenizer, 1, length=1_000_000)


def test_most_tokens_that_a_cache_sees() -> None:
    document = Document("d", (1, 2, 3), questions=(((4, 5), (6,)), ((7,), (8, 9, 10))))
    assert document.tokens == 3 + 4
    assert dataclasses.replace(document, continuation=(1,) * 9, extra={"more_tokens": 5}).tokens == 3 + 9 + 5


@pytest.mark.parametrize("name", ["key-value-asked", "city-asked", "dictionary-asked", "passage-asked"])
def test_a_prompt_that_ends_in_the_question(name: str, tokenizer: Any) -> None:
    found = documents(name, tokenizer, 2)
    for document in found:
        ((last, answer),) = document.questions
        told, asked = tokenizer.decode(document.context + last).rsplit("\n\n", 1)
        asked = asked.removeprefix("Once more, word for word. ")
        assert len(last) == 1 and f"{asked}{tokenizer.decode(answer)}" in told
    # it ends in another question, not in the first one of each text
    assert len({document.questions[0][1] for document in found}) == 2


def test_page_has_a_row_for_every_task() -> None:
    page = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`([^`]+)`", "".join(rows))) == sorted(TASKS.names())
