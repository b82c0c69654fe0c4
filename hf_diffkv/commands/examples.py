"""The long prompts of `hf-diffkv generate --example` and of the demo."""

from __future__ import annotations

from pathlib import Path

from ..evaluation.models import CHECKOUT

# a wheel has them beside this file
FOLDERS = (Path(__file__).parent / "prompts", CHECKOUT / "examples" / "prompts")


def prompt_for(chats: bool) -> str:
    """A long prompt with a question at its end: of the handbook, or for a model that has learnt nothing else, facts."""
    name = "museum.txt" if chats else "recall.txt"
    found = next(folder / name for folder in FOLDERS if (folder / name).is_file())
    return found.read_text(encoding="utf-8").removesuffix("\n")
