"""The messages that docs/troubleshooting.md quotes are those of the packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# first cells of the tables; a message with backticks of its own is quoted with apostrophes
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def messages(path: Path) -> list[str]:
    """All texts of a module as the page writes them: fields of f-strings and of the log are `...`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sd]", "...", node.value))
    return [" ".join(text.replace("`", "'").split()) for text in found]


@pytest.fixture(scope="module")
def said() -> str:
    paths = [path for folder in ("hf_diffkv", "packages") for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(text for path in paths if "tests" not in path.parts for text in messages(path))


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) >= 25
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("message", QUOTED)
def test_the_message_is_in_a_package(message: str, said: str) -> None:
    assert message in said
