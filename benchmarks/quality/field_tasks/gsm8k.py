"""GSM8K: 100 arithmetic problems with room for long reasoning, also after earlier turns of a conversation.

`gsm8k` asks each problem by itself. In `gsm8k_turns`, the conversation before it has about 4,000 tokens of questions
about passages (SQuAD's, from RULER's wheel) with their answers. The cache has read and compressed these turns before
the problem is asked. `GROUP` problems share the same turns.

An answer is correct if the first number after its last ####, or else its last number, is the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from . import wheels
from .cases import Case, Source, chat_text, encode, encode_turns, ends_of

TASKS = ("gsm8k", "gsm8k_turns")
LIMIT = 1024
# a passage, a question and its answer
Passage = tuple[str, str, str]
# tokens of earlier turns, and problems that share the same turns
LENGTH, GROUP = 4096, 20
SEED = 0
REQUEST = "Reason step by step, and write the final number after ####."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def cases(source: Source) -> list[Case]:
    """Makes the cases, task by task. Raises `EvaluationError` if the data is missing."""
    problems = wheels.json_lines(wheels.GSM8K)[: source.samples]
    found = [case_of(source.tokenizer, "gsm8k", problem, []) for problem in problems] if "gsm8k" in source.tasks else []
    if "gsm8k_turns" not in source.tasks:
        return found
    passages = squad()
    for start in range(0, len(problems), GROUP):
        turns = earlier_turns(source.tokenizer, passages, source.length or LENGTH, start // GROUP)
        found += [case_of(source.tokenizer, "gsm8k_turns", each, turns) for each in problems[start : start + GROUP]]
    return found


def case_of(tokenizer: Any, task: str, problem: dict[str, str], turns: list[dict[str, str]]) -> Case:
    """Makes the case of a problem with `id`, `prompt` and `expected`, after earlier turns."""
    messages = [*turns, {"role": "user", "content": f"{problem['prompt']}\n\n{REQUEST}"}]
    whole = chat_text(tokenizer, messages)
    before = chat_text(tokenizer, turns, asked=False) if turns else ""
    reference = {"expected": problem["expected"]}
    ids, earlier = encode_turns(tokenizer, whole, before)
    return Case(task, problem["id"], ids, LIMIT, ends_of(tokenizer), reference, earlier)


def earlier_turns(tokenizer: Any, passages: list[Passage], length: int, group: int) -> list[dict[str, str]]:
    """Draws questions about passages with their answers, until they have `length` tokens in the chat template.

    Args:
        tokenizer: tokenizer of the model.
        passages: passages, each with a question and its answer.
        length: minimum number of tokens.
        group: number of the draw.
    """
    order = random.Random(f"{SEED}/{group}").sample(range(len(passages)), len(passages))
    turns: list[dict[str, str]] = []
    text, tokens = "", 0
    for index in order:
        passage, question, answer = passages[index]
        turns += [{"role": "user", "content": f"{passage}\n\n{question}"}, {"role": "assistant", "content": answer}]
        longer = chat_text(tokenizer, turns, asked=False)
        tokens += len(encode(tokenizer, longer[len(text) :]))
        text = longer
        if tokens >= length:
            return turns
    raise ValueError(f"the passages have fewer than {length} tokens.")


def squad() -> list[Passage]:
    """Reads SQuAD's passages, each with its first question that has an answer."""
    return list(_answered(wheels.ruler_texts("squad")))


def _answered(data: dict[str, Any]) -> Iterator[Passage]:
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            known = [each for each in paragraph["qas"] if not each["is_impossible"] and each["answers"]]
            if known:
                yield paragraph["context"], known[0]["question"], known[0]["answers"][0]["text"]


def final_number(text: str) -> float | None:
    """Returns the first number after the last ####, or else the last number; None if there is none."""
    _, mark, behind = text.rpartition("####")
    found = NUMBER.findall(behind)
    if mark and found:
        return _value(found[0])
    found = NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def score(case: Case, text: str) -> float:
    """Returns 1 if the answer's final number is correct, else 0."""
    given = final_number(text)
    return float(given is not None and abs(given - _value(case.reference["expected"])) < 1e-6)
