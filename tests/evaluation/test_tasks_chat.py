"""Prompts with and without chat templates, and what a model says behind its thoughts."""

from __future__ import annotations

import pytest
from small_chat_models import byte_tokenizer

from hf_diffkv.evaluation.tasks.generating import ChatPrompt, spoken

ASKED = ChatPrompt("Why?", context="A text. ", cue="\nAnswer:", lead=" Because")


def encode(prompt: ChatPrompt, template: str) -> tuple[str, str]:
    """The texts of the context and of the question."""
    tokenizer = byte_tokenizer(template)
    context, question = prompt.encode(tokenizer)
    return tokenizer.decode(context), tokenizer.decode(question)


def test_plain() -> None:
    assert encode(ASKED, "plain") == ("A text. ", "Why?\nAnswer: Because")


def test_chat_template() -> None:
    assert encode(ASKED, "instruct") == ("<s><|user|>\nA text. ", "Why?</s>\n<|assistant|>\n Because")


def test_special_tokens_come_once() -> None:
    tokenizer = byte_tokenizer("instruct")
    context, question = ChatPrompt("Why?").encode(tokenizer)
    assert context == () and question.count(tokenizer.bos_token_id) == 1


def test_without_a_context_all_comes_at_once() -> None:
    assert encode(ChatPrompt("Why?", cue="\nAnswer:"), "plain") == ("", "Why?\nAnswer:")
    assert encode(ChatPrompt("Why?", cue="\nAnswer:"), "instruct") == ("", "<s><|user|>\nWhy?</s>\n<|assistant|>\n")


@pytest.mark.parametrize("template", ["hybrid", "thinking"])
def test_models_that_think_get_no_room_to(template: str) -> None:
    asked = ChatPrompt("Why?", lead="So")
    assert encode(asked, template)[1].endswith("<think>\n\n</think>\n\nSo")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 4.", "The answer is 4."),
        ("    return 4", "    return 4"),
        ("<think>\nIs it 3?</think>\n\nIt is 4.", "It is 4."),
        ("a</think>b</think>c", "c"),
        ("<think>It is 3, or 4", ""),
    ],
)
def test_spoken(text: str, answer: str) -> None:
    assert spoken(text) == answer
