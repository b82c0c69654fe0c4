"""Tests the check of how docstrings and their entries begin."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = '''"""Of a module."""


class Part:
    """Has a slot.

    Text that follows may begin in any way.
    As this does.

    Attributes:
        slot: of the request.
        first, last: those that are held,
            the same as before.
        size: offset of the slot.
    """

    async def run(self, count: int, *rest: int) -> int:
        """
        What is run.

        Args:
            count (int): as many as there are.
            *rest: Number of others.

        Returns:
            The same number.
            as given

        Raises:
            ValueError: has nothing to run.
        """

        def inner() -> dict[str, int]:
            """Those of others.

            Returns:
                total: that which was summed.
            """
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "part.py"
    path.write_text(SOURCE)
    return path


def test_every_beginning_is_found(tool: ModuleType, path: Path, tmp_path: Path) -> None:
    found = list(tool.check([path], tmp_path, ()))
    lines = SOURCE.splitlines()
    parts = [re.fullmatch(r'part\.py:(\d+): (.+?): begins with "(.+)": (.+)', line).groups() for line in found]
    numbers = [int(number) for number, *_ in parts]
    assert numbers == sorted(numbers)
    for number, (*_, words) in zip(numbers, parts):
        assert words in lines[number - 1]
    assert [(name, start) for _, name, start, _ in parts] == [
        ("module", "Of"),
        ("Part", "Has"),
        ("Part:slot", "Of"),
        ("Part:first, last", "Those"),
        ("Part.run", "What is"),
        ("Part.run:count", "As"),
        ("Part.run:Returns", "The same"),
        ("Part.run:ValueError", "Has"),
        ("Part.run.inner", "Those"),
        ("Part.run.inner:total", "That which"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        "Offset of a page.",
        "of a page.",
        "Thoseness.",
        "What follows.",
        "Asks.",
        "Hashes.",
        "The samples.",
        "That page.",
    ],
)
def test_words_that_are_fine(tool: ModuleType, words: str) -> None:
    """A docstring is refused only for whole words in the given case."""
    assert [text.refused for text in tool.texts(f'"""{words}"""')] == [None]


def test_allowed_by_file_and_name(tool: ModuleType, path: Path, tmp_path: Path) -> None:
    all_found = list(tool.check([path], tmp_path, ()))
    allowed = {("part.py", "Part"), ("part.py", "Part.run:Returns")}
    left = list(tool.check([path], tmp_path, allowed))
    assert left == [line for line in all_found if ": Part: " not in line and ": Part.run:Returns: " not in line]
    assert len(left) == len(all_found) - 2


def test_an_allowance_that_matches_nothing(tool: ModuleType, path: Path, tmp_path: Path) -> None:
    path.write_text('"""Number of slots."""')
    (tmp_path / "other.py").write_text("")
    allowed = {("part.py", "module"), ("gone.py", "module"), ("other.py", "module")}
    # an existing file is judged only if it is checked
    assert list(tool.check([path], tmp_path, allowed)) == [
        "gone.py: module: allowed, but nothing there needs it",
        "part.py: module: allowed, but nothing there needs it",
    ]


def test_exit_codes(
    tool: ModuleType, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "ALLOWED", frozenset())
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "copy.py").write_text(SOURCE)
    assert tool.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith('part.py:1: module: begins with "Of": Of a module.\n') and "build" not in printed
    path.write_text('"""Number of slots."""')
    assert tool.main([str(path)]) == 0
    assert capsys.readouterr().out == ""
    for wrong, allowed in ((tmp_path / "none", 0), (tmp_path.parent, 0), (path, 21)):
        monkeypatch.setattr(tool, "ALLOWED", frozenset(("part.py", str(i)) for i in range(allowed)))
        with pytest.raises(SystemExit, match="2"):
            tool.main([str(wrong)])


def test_what_the_project_allows(tool: ModuleType) -> None:
    assert len(tool.ALLOWED) <= tool.MOST_ALLOWED <= 20
