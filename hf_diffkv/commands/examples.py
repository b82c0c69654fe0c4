"""The texts to begin with, and what to ask of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..evaluation.models import CHECKOUT

# a wheel has them beside this file
FOLDERS = (Path(__file__).parent / "prompts", CHECKOUT / "examples" / "prompts")
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
    """A document and a question of it; `name` is what to call both, `hint` what to know of them."""

    name: str
    document: str
    question: str = ""
    hint: str = ""


def chats() -> list[Example]:
    """The handbook of a museum, which ends with the first of the questions, and the others."""
    document = _read("museum.txt").removesuffix(QUESTIONS[0]).rstrip()
    return [Example(question, document, question) for question in QUESTIONS]


def free_prompts(chats: bool) -> list[Example]:
    """Beginnings to continue, or, for a model that has learnt nothing else, facts of which the last line asks one."""
    if chats:
        return [Example(text, text) for text in BEGINNINGS]
    text = _read("recall.txt")
    facts, _, asked = text.rpartition("?")
    hint = "Facts such as @sky=0400 stand between lines of code; the last line, such as ?sky=, asks for one of them."
    return [Example(f"?{key}=", f"{facts}?{key}=", hint=hint) for key in (asked.removesuffix("="), *KEYS)]


def prompt_for(chats: bool) -> str:
    """A long prompt with a question at its end: of the handbook, or for a model that has learnt nothing else, facts."""
    return _read("museum.txt" if chats else "recall.txt")


def _read(name: str) -> str:
    found = next(folder / name for folder in FOLDERS if (folder / name).is_file())
    return found.read_text(encoding="utf-8").removesuffix("\n")
