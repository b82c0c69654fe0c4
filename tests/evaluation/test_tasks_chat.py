"""Prompts with and without chat templates, and what a model says behind its thoughts."""

from __future__ import annotations

import pytest
from small_chat_models import byte_tokenizer

from hf_diffkv.evaluation.tasks.chat import Prompt, Tokens, spoken

ASKED = Prompt("Why?", context="A text. ", cue="\nAnswer:", lead=" Because")


def encode(prompt: Prompt, template: str, thinks: bool = False) -> tuple[str, str, Tokens]:
    """The two texts and all else."""
    tokenizer = byte_tokenizer(template)
    tokens = prompt.encode(tokenizer, thinks)
    return tokenizer.decode(tokens.context), tokenizer.decode(tokens.question), tokens


def test_plain() -> None:
    context, question, tokens = encode(ASKED, "plain")
    assert (context, question) == ("A text. ", "Why?\nAnswer: Because")
    assert not tokens.chat and not tokens.thinking


def test_chat_template() -> None:
    context, question, tokens = encode(ASKED, "instruct")
    assert context == "<s><|user|>\nA text. "
    assert question == "Why?</s>\n<|assistant|>\n Because"
    assert tokens.chat and not tokens.thinking


def test_special_tokens_come_once() -> None:
    tokenizer = byte_tokenizer("instruct")
    ids = Prompt("Why?").encode(tokenizer, False).question
    assert ids.count(tokenizer.bos_token_id) == 1
    assert Prompt("Why?").encode(byte_tokenizer(), False).context == ()


def test_without_a_context_all_comes_at_once() -> None:
    context, question, tokens = encode(Prompt("Why?", cue="\nAnswer:"), "plain")
    assert (context, question) == ("", "Why?\nAnswer:")
    context, question, _ = encode(Prompt("Why?", cue="\nAnswer:"), "instruct")
    assert (context, question) == ("", "<s><|user|>\nWhy?</s>\n<|assistant|>\n")


def test_prompts_that_want_no_template() -> None:
    context, question, tokens = encode(Prompt("Why?", context="A text. ", chat=False), "instruct")
    assert (context, question) == ("A text. ", "Why?")
    assert not tokens.chat


def test_prompts_with_another_plain_form() -> None:
    prompt = Prompt("Complete it: def f():", plain="def f():\n")
    assert encode(prompt, "plain")[1] == "def f():\n"
    assert "Complete it: def f():" in encode(prompt, "instruct")[1]


@pytest.mark.parametrize("thinks", [True, False])
def test_models_that_can_think(thinks: bool) -> None:
    _, question, tokens = encode(Prompt("Why?"), "hybrid", thinks)
    assert question.endswith("<|assistant|>\n" if thinks else "<think>\n\n</think>\n\n")
    assert not tokens.thinking


@pytest.mark.parametrize("thinks", [True, False])
def test_models_that_always_think(thinks: bool) -> None:
    _, question, tokens = encode(Prompt("Why?", lead="" if thinks else "So"), "thinking", thinks)
    assert question.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\nSo")
    assert tokens.thinking is thinks


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("The answer is 4.", False, "The answer is 4."),
        ("    return 4", False, "    return 4"),
        ("<think>\nIs it 3?</think>\n\nIt is 4.", False, "It is 4."),
        ("Is it 3?</think>It is 4.", True, "It is 4."),
        ("a</think>b</think>c", True, "c"),
        ("<think>It is 3, or 4", False, ""),
        ("It is 3, or 4", True, ""),
    ],
)
def test_spoken(text: str, thinking: bool, answer: str) -> None:
    assert spoken(text, thinking) == answer
