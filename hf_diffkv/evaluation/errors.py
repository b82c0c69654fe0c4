"""Errors that the user of an evaluation can correct."""

from __future__ import annotations

from collections.abc import Iterable

from ..arguments import similar


class EvaluationError(ValueError):
    """An evaluation cannot run as requested; the message says in one line what to change."""


def unknown(kind: str, name: str, known: Iterable[str]) -> EvaluationError:
    """Returns the error for an unknown name, with suggestions."""
    names = sorted(known)
    hint = meant(name, names) or f"choose from {', '.join(names)}."
    return EvaluationError(f"unknown {kind} {name!r}: {hint}")


def meant(name: str, known: Iterable[str]) -> str:
    """Returns a question that suggests similar names, or an empty string."""
    close = similar(name, known, 3)
    return f"did you mean {' or '.join(close)}?" if close else ""


def one_line(error: BaseException | str) -> str:
    """Returns a message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
