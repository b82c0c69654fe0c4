"""Output of commands: help, progress on stderr, and tables that fit the terminal."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ..evaluation.errors import one_line as one_line
from ..heads.lookup import HINTS

WIDEST = 100
NARROWEST = 20
# minimum number of columns for help next to options
SIDE_BY_SIDE = 60


class HelpFormatter(click.HelpFormatter):
    """Help formatter that puts help below options if there is no room next to them."""

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= SIDE_BY_SIDE else 4, col_spacing)


class Context(click.Context):
    formatter_class = HelpFormatter


class Command(click.Command):
    """Base class of the commands of `hf-diffkv`."""

    context_class = Context


class Failure(click.ClickException):
    """A command failed or has a bad result; the exit code is 1, not 2 as for usage errors."""

    exit_code = 1


class Interrupted(Failure):
    """The user interrupted a command; the message says how to continue."""

    exit_code = 130


def width() -> int:
    """Returns the number of columns for output."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((80, 24)).columns))


def progress(message: str, quiet: bool = False) -> None:
    """Prints a line of progress on stderr unless `quiet`."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


class _ToTerminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        progress(paragraph(record.getMessage()))


@contextmanager
def log_on_terminal(quiet: bool) -> Iterator[None]:
    """Prints the library's log to stderr within the block, wrapped to the terminal; `quiet` omits hints.

    Warnings are printed without their location in the source.
    """
    logger, hints, handler = logging.getLogger("hf_diffkv"), logging.getLogger(HINTS), _ToTerminal(logging.WARNING)
    logger.addHandler(handler)
    hints.disabled = quiet
    with_place, warnings.formatwarning = warnings.formatwarning, _formatted
    try:
        yield
    finally:
        warnings.formatwarning = with_place
        logger.removeHandler(handler)
        hints.disabled = False


def _formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
    return f"{category.__name__}: {message}\n"


def to_terminal() -> bool:
    """Returns whether stdout is a terminal."""
    return sys.stdout.isatty()


def colours() -> bool:
    """Returns whether stdout may be coloured (https://no-color.org)."""
    return to_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paragraph(text: str) -> str:
    """Wraps `text` to the terminal."""
    return textwrap.fill(" ".join(text.split()), width(), break_on_hyphens=False, break_long_words=False)


def entry(name: str, text: str, column: int) -> str:
    """Wraps `text` to the terminal, starting at `column` after `name`."""
    return textwrap.fill(text, width(), initial_indent=name.ljust(column), subsequent_indent=" " * column)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats aligned columns or, if they do not fit, a heading for each row and a line for each cell."""
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
    """Formats bytes for reading, in powers of ten."""
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.2f} MB"
