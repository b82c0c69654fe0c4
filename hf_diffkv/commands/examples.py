"""Long prompts of `hf-diffkv generate --example` and of the demo."""

from __future__ import annotations

from pathlib import Path

from ..running.models import CHECKOUT

# folders of the prompts in a wheel and in a checkout
FOLDERS = (Path(__file__).parent / "prompts", CHECKOUT / "examples" / "prompts")


def prompt_for(chats: bool) -> str:
    """Reads a long prompt that ends with a question: a handbook for chat models, facts for others."""
    name = "museum.txt" if chats else "recall.txt"
    found = next(folder / name for folder in FOLDERS if (folder / name).is_file())
    return found.read_text(encoding="utf-8").removesuffix("\n")
