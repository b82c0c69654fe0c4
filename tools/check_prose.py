"""Finds docstrings and argument entries that begin with words that hide the noun.

A docstring begins with its noun or with a verb in the third person. So does each entry under `Args:`, `Attributes:`,
`Returns:` and the like. For example

    .venv/bin/python tools/check_prose.py tools benchmarks

prints `file:line: name: the words` for each text that begins with one of `REFUSED`, then each unused entry of `ALLOWED`
for these folders. The exit code is 1 if it printed anything.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFUSED = ("Of", "Those", "The same", "As", "Has", "What is", "That which")

# (file, name) as printed
ALLOWED: frozenset[tuple[str, str]] = frozenset()
MOST_ALLOWED = 20

SECTION = re.compile(r"(Args|Arguments|Attributes|Parameters|Raises|Returns|Yields):$")
# sections whose first line may be text without a name
NAMELESS = ("Returns", "Yields")
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# `name: `, `first, second: ` or `name (type): `
ENTRY = re.compile(r"([*`\w.]+(?:, [*`\w.]+)*)(?: \(.*?\))?: *")


@dataclass(frozen=True)
class Text:
    """A docstring, or one entry of it.

    Attributes:
        name: dotted name of the documented object within its file, `module` for the file itself; an entry adds a colon
            and its own name or section.
        line: number of the line in the file.
        words: first line of the text.
    """

    name: str
    line: int
    words: str

    @property
    def refused(self) -> str | None:
        """Entry of `REFUSED` that the text begins with, or None. An entry of a docstring may begin in lower case."""
        words = self.words[:1].upper() + self.words[1:] if ":" in self.name else self.words
        return next((start for start in REFUSED if re.match(rf"{start}\b", words)), None)


def texts(source: str) -> Iterator[Text]:
    """Yields the docstrings of a file and their entries, in order."""
    yield from _texts_of(ast.parse(source), "")


def _texts_of(node: ast.AST, name: str) -> Iterator[Text]:
    if isinstance(node, (ast.Module, *NAMED)) and ast.get_docstring(node) is not None:
        literal = node.body[0].value
        yield from _split(name or "module", literal.value.splitlines(), literal.lineno)
    for child in ast.iter_child_nodes(node):
        own = child.name if isinstance(child, NAMED) else ""
        yield from _texts_of(child, ".".join(filter(None, (name, own))))


def _split(name: str, lines: list[str], first: int) -> Iterator[Text]:
    """Yields a docstring and its entries.

    Args:
        name: dotted name of the documented object.
        lines: the literal's lines, with their indentation.
        first: number of the first line in the file.
    """
    section, margin, begun = "", None, False
    for number, line in enumerate(lines, first):
        words = line.strip()
        if not words:
            continue
        if not begun:
            begun = True
            yield Text(name, number, words)
        elif match := SECTION.match(words):
            section, margin = match[1], None
        elif section:
            indentation = len(line) - len(line.lstrip())
            starts = margin is None
            margin = indentation if margin is None else margin
            if indentation < margin:
                section = ""
            elif indentation == margin:
                if entry := ENTRY.match(words):
                    yield Text(f"{name}:{entry[1]}", number, words[entry.end() :])
                elif starts or section not in NAMELESS:
                    yield Text(f"{name}:{section}", number, words)


def check(files: Iterable[Path], root: Path, allowed: Collection[tuple[str, str]]) -> Iterator[str]:
    """Yields a line for each refused text and for each unused allowance of these files."""
    used: set[tuple[str, str]] = set()
    seen: set[str] = set()
    for path in files:
        file = path.relative_to(root).as_posix()
        seen.add(file)
        for text in texts(path.read_text(encoding="utf-8")):
            if text.refused is None:
                continue
            if (file, text.name) in allowed:
                used.add((file, text.name))
            else:
                yield f'{file}:{text.line}: {text.name}: begins with "{text.refused}": {text.words}'
    for file, name in sorted(set(allowed) - used):
        if file in seen or not (root / file).exists():
            yield f"{file}: {name}: allowed, but nothing there needs it"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="folders and files to check")
    paths = [path.resolve() for path in parser.parse_args(arguments).paths]
    if unknown := [path for path in paths if not path.exists() or not path.is_relative_to(ROOT)]:
        parser.error(f"{unknown[0]} is no file or folder of this repository")
    if len(ALLOWED) > MOST_ALLOWED:
        parser.error(f"{len(ALLOWED)} cases are allowed, more than {MOST_ALLOWED}; reword some")
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    # packages are built in place, so skip their build folders
    files = sorted(file for file in files if "build" not in file.relative_to(ROOT).parts)
    found = list(check(files, ROOT, ALLOWED))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
