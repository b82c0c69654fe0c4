"""Text for calibrating thresholds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ..evaluation.errors import EvaluationError
from ..evaluation.tasks.text import texts
from ..extras import install

# the paper calibrates on all subjects of its train split
MATH = "EleutherAI/hendrycks_math"
MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
# name for the chapters of Python's language reference, which do not need the Hub
OFFLINE_TEXT = "offline"
# columns of a data set that may hold text; the first group present is used
TEXT_COLUMNS = (("text",), ("problem", "solution"), ("question", "answer"), ("prompt", "completion"), ("content",))
LABELS = {"problem": "Problem:\n", "solution": "Solution:\n"}
SPLIT = "train"
OWN_TEXT = "give your own text: --text FILE"


def read_pieces(name: str) -> Iterator[str]:
    """Reads the text `name`: a UTF-8 file, `offline`, or a Hub data set (`owner/name`, `owner/name:config`).

    Raises:
        EvaluationError: the text cannot be read; for a data set, a later piece may raise the error.
    """
    if name == OFFLINE_TEXT:
        return iter(texts())
    path = Path(name)
    if path.is_file():
        try:
            return iter([path.read_text(encoding="utf-8")])
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationError(f"cannot read {path}: {error}.") from error
    parts = name.partition(":")[0].split("/")
    if path.suffix or path.is_dir() or len(parts) != 2 or not all(parts):
        raise EvaluationError(f"--text {name}: there is no such file, and it is not a Hub data set; {OWN_TEXT}.")
    return _data_set(name)


def _data_set(name: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise EvaluationError(
            f"the data set {name} needs the package datasets: {install('eval')}; or {OWN_TEXT}."
        ) from error
    repository, _, config = name.partition(":")
    configs = MATH_SUBJECTS if repository == MATH and not config else (config or None,)
    try:
        streams = [iter(datasets.load_dataset(repository, each, split=SPLIT, streaming=True)) for each in configs]
        # subjects take turns
        for row in chain.from_iterable(zip(*streams)):
            yield _text_of(name, row)
    except EvaluationError:
        raise
    except Exception as error:
        # the kind of error depends on the data set's format, on the Hub and on the network
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EvaluationError(
            f"cannot read the data set {name} ({reason}); {OWN_TEXT}, or use Python's language reference: --text "
            f"{OFFLINE_TEXT}."
        ) from error


def _text_of(name: str, row: dict[str, Any]) -> str:
    for columns in TEXT_COLUMNS:
        if all(isinstance(row.get(column), str) for column in columns):
            return "\n\n".join(LABELS.get(column, "") + row[column] for column in columns)
    raise EvaluationError(
        f"the data set {name} has the columns {sorted(row)}, none of which is known to hold text ("
        f"{', '.join('+'.join(columns) for columns in TEXT_COLUMNS)}); {OWN_TEXT}."
    )
