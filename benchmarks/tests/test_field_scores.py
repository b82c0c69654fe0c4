"""Prompts and scores of field tasks, on made-up lines in the format of the wheels."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from small_chat_models import byte_tokenizer

from hf_diffkv.evaluation.errors import EvaluationError

TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEEDLE = "[INST] A magic number is hidden.\nIt is 7.\nWhich is it? [/INST] The magic number is"
SOLVED = "[INST] List: a a b. Most common? [/INST] Answer: 1. a\n[INST] List: c d c. Most common? [/INST] Answer:"
PROBLEM = {
    "task_id": "HumanEval/7",
    "prompt": 'import math\n\n\ndef area(r):\n    """ Area of a circle. """\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
}
WORD_PROBLEM = {"id": "problem-1", "prompt": "What is 2 + 3?", "expected": "1,005"}
PASSAGES = [(f"Passage {number} is about number {number}.", "About what?", f"number {number}") for number in range(40)]


@pytest.fixture
def tokenizer() -> Any:
    found = byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def tasks(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("field_tasks")


def case(tasks: ModuleType, task: str, **reference: Any) -> Any:
    script_cases = tasks.ruler.Case
    return script_cases(task, "0", (1, 2), 8, (0,), reference)


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def test_a_prompt_of_ruler_in_a_chat_template(tasks: ModuleType, tokenizer: Any) -> None:
    assert tasks.ruler.prompt_text(tokenizer, NEEDLE) == (
        "<|user|>A magic number is hidden.\nIt is 7.\nWhich is it?</s><|assistant|> The magic number is"
    )


def test_a_solved_example_is_an_earlier_turn(tasks: ModuleType, tokenizer: Any) -> None:
    assert tasks.ruler.prompt_text(tokenizer, SOLVED) == (
        "<|user|>List: a a b. Most common?</s><|assistant|>Answer: 1. a</s>"
        "<|user|>List: c d c. Most common?</s><|assistant|> Answer:"
    )


@pytest.mark.parametrize("text", ["no marks", "before [INST] it [/INST] after", "[INST] no end"])
def test_prompts_without_marks_are_refused(tasks: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="marks, and must begin with one"):
        tasks.ruler.turns_of(text)


def test_ruler_counts_references(tasks: ModuleType) -> None:
    all_of = case(tasks, "niah_multivalue", outputs=["123", "Abc-def", "9", "4567"])
    score = tasks.ruler.score
    assert score(all_of, " They are 123, ABC-DEF and 4567.") == 0.75
    assert score(all_of, "") == 0.0
    any_of = case(tasks, "qa_1", outputs=["the Rhine", "Rhine river"])
    assert score(any_of, "It is the rhine\x07.") == 1.0
    assert score(any_of, "It is the Danube.") == 0.0
    # a control character separates its neighbours
    assert score(case(tasks, "vt", outputs=["AB"]), "A\x01B") == 0.0


def test_the_tasks_of_ruler(tasks: ModuleType) -> None:
    assert len(tasks.ruler.TASKS) == len(set(tasks.ruler.TASKS)) == 13
    assert tasks.suite_of("cwe") is tasks.ruler and tasks.suite_of("gsm8k_turns") is tasks.gsm8k
    assert tasks.chosen_tasks("ruler", "vt, qa_1") == ("vt", "qa_1")
    with pytest.raises(EvaluationError, match="niah_singel_1.*did you mean niah_single_1"):
        tasks.chosen_tasks("ruler", "niah_singel_1")
    with pytest.raises(EvaluationError, match="--tasks names no task"):
        tasks.chosen_tasks("ruler", " ,")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("First 4, then 5.\n#### 18", 18.0),
        ("#### 3\nNo, wait.\n#### -1,234.50 dollars, not 7", -1234.5),
        ("She has 12 apples and gives 3 away, so 9.", 9.0),
        ("#### nothing, but 6 before", 6.0),
        ("no number", None),
    ],
)
def test_final_numbers(tasks: ModuleType, text: str, number: float | None) -> None:
    assert tasks.gsm8k.final_number(text) == number


def test_gsm8k_compares_numbers(tasks: ModuleType) -> None:
    problem = case(tasks, "gsm8k", expected="1,005")
    assert [tasks.gsm8k.score(problem, text) for text in ("#### 1005.0", "#### 1004", "")] == [1.0, 0.0, 0.0]


def test_a_problem_behind_earlier_turns(tasks: ModuleType, tokenizer: Any) -> None:
    turns = tasks.gsm8k.earlier_turns(tokenizer, PASSAGES, 500, 0)
    assert turns == tasks.gsm8k.earlier_turns(tokenizer, PASSAGES, 500, 0)
    assert turns != tasks.gsm8k.earlier_turns(tokenizer, PASSAGES, 500, 1)
    made = tasks.gsm8k.case_of(tokenizer, "gsm8k_turns", WORD_PROBLEM, turns)
    assert 500 <= len(made.earlier) < 600 and made.tokens == len(made.earlier) + len(made.ids)
    assert text_of(tokenizer, made.earlier).startswith("<|user|>Passage ")
    assert text_of(tokenizer, made.ids) == f"<|user|>What is 2 + 3?\n\n{tasks.gsm8k.REQUEST}</s><|assistant|>"
    assert made.limit >= 1000
    alone = tasks.gsm8k.case_of(tokenizer, "gsm8k", WORD_PROBLEM, [])
    assert (alone.ids, alone.earlier) == (made.ids, ()) and alone.digest != made.digest
    with pytest.raises(ValueError, match="fewer than 5000 tokens"):
        tasks.gsm8k.earlier_turns(tokenizer, PASSAGES, 5000, 0)


def test_passages_with_answers(tasks: ModuleType) -> None:
    asked = [
        {"question": "Never?", "is_impossible": True, "answers": []},
        {"question": "Where?", "is_impossible": False, "answers": [{"text": "here"}, {"text": "there"}]},
    ]
    paragraphs = [{"context": "Text.", "qas": asked}, {"context": "Other.", "qas": asked[:1]}]
    assert list(tasks.gsm8k._answered({"data": [{"paragraphs": paragraphs}]})) == [("Text.", "Where?", "here")]


def test_a_function_to_write(tasks: ModuleType, tokenizer: Any) -> None:
    made = tasks.humaneval.case_of(tokenizer, PROBLEM)
    text = text_of(tokenizer, made.ids)
    assert (made.task, made.name) == ("humaneval", "7")
    assert text.endswith(f"<|assistant|>```python\n{PROBLEM['prompt']}") and text.count(PROBLEM["prompt"]) == 2


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("    return math.pi * r * r\n```\nThis is no Python.", 1.0),
        ("    return 3 * r * r\n", 0.0),
        ("    return math.pi * r *", 0.0),
        # the whole function again
        ("def area(r):\n    return math.pi * r**2\n", 1.0),
        ("def square(r):\n    return math.pi * r**2\n", 0.0),
        ("", 0.0),
    ],
)
def test_functions_are_run(tasks: ModuleType, tokenizer: Any, text: str, passes: float) -> None:
    assert tasks.humaneval.score(tasks.humaneval.case_of(tokenizer, PROBLEM), text) == passes


def test_ends(tasks: ModuleType, tokenizer: Any) -> None:
    ends_of, answer_text = tasks.ruler.ends_of, __import__("field_tasks.cases").cases.answer_text
    assert ends_of(tokenizer) == (tokenizer.eos_token_id,)
    mark = tokenizer("`").input_ids
    # several tokens cannot end an answer
    assert ends_of(tokenizer, "`", "```") == tuple(sorted([tokenizer.eos_token_id, *mark]))
    made = tasks.humaneval.case_of(tokenizer, PROBLEM)
    ids = tokenizer("x = 1").input_ids
    assert answer_text(tokenizer, made, [*ids, tokenizer.eos_token_id]) == answer_text(tokenizer, made, ids) == "x = 1"


def test_a_digest_has_everything_that_counts(tasks: ModuleType) -> None:
    make = tasks.ruler.Case
    content = {"ids": (1, 2), "limit": 3, "ends": (0,), "reference": {"outputs": ["a"]}, "earlier": (9,)}
    other = {"ids": (1, 3), "limit": 4, "ends": (1,), "reference": {"outputs": ["b"]}, "earlier": ()}
    digests = {make("vt", "0", **{**content, name: other[name]}).digest for name in content}
    digests.add(make("vt", "0", **content).digest)
    assert len(digests) == 6
    assert make("cwe", "1", **content).digest in digests


def test_no_chat_template(tasks: ModuleType) -> None:
    with pytest.raises(EvaluationError, match="no chat template"):
        tasks.ruler.prompt_text(byte_tokenizer(), NEEDLE)
