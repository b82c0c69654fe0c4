"""Tasks of tiny-lm: facts are stated once and asked for, and texts continue where the prompt ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer

from hf_diffkv.evaluation.tasks import TASKS
from hf_diffkv.evaluation.tasks.base import Document, Source

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny_tasks(script: Callable[[str], ModuleType], names: None) -> ModuleType:
    return script("tiny_tasks")


def documents(name: str, count: int = 4) -> tuple[list[Document], list[Document]]:
    """Made with two seeds."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "models" / "tiny-lm")
    made = [TASKS.find(name)().documents(Source(tokenizer, count, 320, seed)) for seed in (0, 1)]
    assert [each.digest for each in made[0]] != [each.digest for each in made[1]]
    assert len({each.digest for each in made[0]}) == count
    return made[0], made[1]


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def test_recall(tiny_tasks: ModuleType) -> None:
    for document in sum(documents("tiny-recall"), []):
        stated = dict(re.findall(r"^@([a-z]{2,3})=(\d{4})$", text_of(document.context), re.MULTILINE))
        asked = {text_of(question): text_of(answer) for question, answer in document.questions}
        assert asked == {f"?{key}=": value for key, value in stated.items()} and asked
        assert len(document.context) == 320 and document.context[-1] == ord("\n")


def test_source(tiny_tasks: ModuleType) -> None:
    held_out = tiny_tasks.data.library_text(held_out=True)
    for document in documents("tiny-source")[0]:
        assert (len(document.context), len(document.continuation)) == (320, 128)
        assert text_of(document.context + document.continuation) in held_out
