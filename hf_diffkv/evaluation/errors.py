"""What a user of an evaluation can put right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EvaluationError(ValueError):
    """An evaluation that cannot be made as asked; the message says in one line what to change."""


def unknown(kind: str, name: str, known: Iterable[str]) -> EvaluationError:
    """The error for a name that is not known, with what may have been meant."""
    names = sorted(known)
    hint = meant(name, names) or f"choose from {', '.join(names)}."
    return EvaluationError(f"unknown {kind} {name!r}: {hint}")


def meant(name: str, known: Iterable[str]) -> str:
    """A question with the names that are like this one; empty where none is."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def one_line(error: BaseException | str) -> str:
    """A message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
