"""What was said, beside a saved cache, so that a later run can go on from it. Importing it loads no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import EvaluationError

TALK_NAME = "talk.json"


def write_talk(folder: Path, model: str, ids: Sequence[int], first: str | None) -> None:
    """Writes what `read_talk` reads: the ids of all tokens, the last included, and the first message."""
    state = {"model": model, "ids": list(ids), "first": first}
    (folder / TALK_NAME).write_text(json.dumps(state) + "\n", encoding="utf-8")


def read_talk(folder: Path) -> dict[str, Any]:
    """`ids` and `first` of a talk, as `Talk` takes them. Raises `EvaluationError` where the folder has none."""
    path = folder / TALK_NAME
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {"ids": saved["ids"], "first": saved["first"]}
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} is no saved talk.") from error
