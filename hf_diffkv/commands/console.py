"""How commands show their help, and what they write: progress to stderr, tables that fit the terminal."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from ..config.found import HINTS
from ..evaluation.errors import one_line as one_line

WIDEST = 100
NARROWEST = 20
# columns from which on there is room for help beside an option
SIDE_BY_SIDE = 60


class HelpFormatter(click.HelpFormatter):
    """Puts help below options where there is no room beside them."""

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= SIDE_BY_SIDE else 4, col_spacing)


class Context(click.Context):
    formatter_class = HelpFormatter


class Command(click.Command):
    """A command of `hf-diffkv`."""

    context_class = Context


class Failure(click.ClickException):
    """What was asked cannot be done, or came out badly; ends with exit code 1. Usage errors end with 2."""

    exit_code = 1


class Interrupted(Failure):
    """The user stopped it; the message says how to go on."""

    exit_code = 130


def width() -> int:
    """Columns to write in."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns))


def progress(message: str, quiet: bool = False) -> None:
    """A line on stderr about what is being done."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


class _ToTerminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        progress(paragraph(record.getMessage()))


@contextmanager
def log_on_terminal(quiet: bool) -> Iterator[None]:
    """Within, what the library logs goes to stderr, wrapped to the terminal; hints do not if `quiet`."""
    logger, hints, handler = logging.getLogger("hf_diffkv"), logging.getLogger(HINTS), _ToTerminal(logging.WARNING)
    logger.addHandler(handler)
    hints.disabled = quiet
    try:
        yield
    finally:
        logger.removeHandler(handler)
        hints.disabled = False


def to_terminal() -> bool:
    """Whether a person reads stdout as it comes."""
    return sys.stdout.isatty()


def colours() -> bool:
    """Whether stdout may be coloured (https://no-color.org)."""
    return to_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paragraph(text: str) -> str:
    """`text` wrapped to the terminal."""
    return textwrap.fill(" ".join(text.split()), width(), break_on_hyphens=False, break_long_words=False)


def entry(name: str, text: str, column: int) -> str:
    """`text` wrapped to the terminal from `column` on, behind `name`."""
    return textwrap.fill(text, width(), initial_indent=name.ljust(column), subsequent_indent=" " * column)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; where they do not fit, a heading for each row and a line for each cell."""
    lines = [list(header), *map(list, rows)]
    sizes = [max(map(len, column)) for column in zip(*lines)]
    if sum(sizes) + 2 * (len(sizes) - 1) <= width():
        texts = []
        for line in lines:
            cells = [line[0].ljust(sizes[0]), *(cell.rjust(size) for cell, size in zip(line[1:], sizes[1:]))]
            texts.append("  ".join(cells).rstrip())
        return "\n".join(texts)
    texts = []
    for row in rows:
        texts.append(row[0])
        texts += [f"  {name + ': ' if name else ''}{cell}" for name, cell in zip(header[1:], row[1:]) if cell]
    return "\n".join(texts)


def megabytes(count: int | None) -> str:
    """Bytes for people, in powers of ten."""
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
