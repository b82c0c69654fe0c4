"""Commands of `hf-diffkv` that messages, help and pages print, collected from sources, so that new ones are found."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md")) + sorted((ROOT / "packages").glob("*/README.md"))
SOURCES = [*sorted((ROOT / "hf_diffkv").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]
SOURCES += sorted(path for path in (ROOT / "packages").rglob("*.py") if "tests" not in path.parts)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# stands for what a message fills in
FILLED = "FILLED"
# a command is in back quotes, on a separate line, or after one of these
STARTS = r"(?:^[ \t>]*(?:\$ )?(?:[A-Z_]+=\S+ )?|; |: |\()"
COMMAND = r"(?:hf-diffkv|python -m hf_diffkv) (?P<command>[a-z](?:[^`;\n).]|\.(?!\s))*)"


@dataclass(frozen=True)
class Printed:
    """A command as it is printed, without `hf-diffkv`.

    Attributes:
        advice: whether it is part of a message or help, which users copy as it is.
    """

    where: str
    text: str
    advice: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def names_only(self) -> bool:
        """Whether it is only the name of a command, or of one and an option."""
        return re.fullmatch(r"[a-z-]+( --[a-z-]+)?", self.text) is not None


def printed_commands() -> list[Printed]:
    """Returns all of them, each once per file."""
    found = [each for path in PAGES for each in _in_page(path)]
    found += [each for path in SOURCES for each in _in_source(path)]
    return list(dict.fromkeys(found))


def _in_page(path: Path) -> Iterator[Printed]:
    where, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    for block in blocks:
        for command in _commands(block.replace("\\\n", " ")):
            yield Printed(where, command, False)
    for quoted in re.findall(r"`([^`]+)`", prose):
        for command in _commands(" ".join(quoted.split())):
            yield Printed(where, command, False)


def _in_source(path: Path) -> Iterator[Printed]:
    where, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))
    documented = [
        node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None
    ]
    docstrings = {id(node.body[0].value) for node in documented}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value.replace("%s", FILLED)
        else:
            continue
        for command in _commands(text):
            yield Printed(where, command, id(node) not in docstrings)


def _commands(text: str) -> Iterator[str]:
    quoted = re.findall(rf"`{COMMAND}`", text)
    plain = re.findall(STARTS + COMMAND, re.sub(r"`[^`]*`", "", text), re.MULTILINE)
    for command in [*quoted, *plain]:
        yield " ".join(command.strip().removesuffix(".").split())
