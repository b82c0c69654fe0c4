"""Example texts, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_diffkv.commands.examples import prompt_for

QUESTIONS = (
    "What is the telephone number of the doctor?",
    "Who was the last keeper?",
    "What is the name of the rescue boat?",
    "How many pieces of glass are in the lens?",
    "What is the cafe known for?",
)
BEGINNINGS = ("Once upon a time", "The three most common causes of a fire at sea are")
KEYS = ("sky", "tin", "jar", "hen")


@dataclass(frozen=True)
class Example:
    """A document and a question about it, with a `name` for both and a `hint` about them."""

    name: str
    document: str
    question: str = ""
    hint: str = ""


def chats() -> list[Example]:
    """Returns the handbook of a museum, with each of the questions."""
    document = prompt_for(True).removesuffix(QUESTIONS[0]).rstrip()
    return [Example(question, document, question) for question in QUESTIONS]


def free_prompts(chats: bool) -> list[Example]:
    """Returns beginnings to continue or, unless the model chats, facts and a last line that asks for one."""
    if chats:
        return [Example(text, text) for text in BEGINNINGS]
    text = prompt_for(False)
    facts, _, asked = text.rpartition("?")
    hint = "Facts such as @sky=0400 appear between lines of code; the last line, such as ?sky=, asks for one of them."
    return [Example(f"?{key}=", f"{facts}?{key}=", hint=hint) for key in (asked.removesuffix("="), *KEYS)]
