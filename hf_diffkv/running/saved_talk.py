"""Saves a conversation next to a saved cache, so that a later run can continue it. Does not import PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.errors import EvaluationError
from ..replacing import save_text

TALK_NAME = "talk.json"


def write_talk(folder: Path, model: str, ids: Sequence[int], first: str | None) -> None:
    """Writes the token ids of a conversation, including the last, and its first message."""
    state = {"model": model, "ids": list(ids), "first": first}
    save_text(json.dumps(state) + "\n", folder / TALK_NAME)


def read_talk(folder: Path) -> dict[str, Any]:
    """Reads `ids` and `first` of a conversation for `Talk`. Raises `EvaluationError` if the folder has none."""
    path = folder / TALK_NAME
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        ids, first = saved["ids"], saved["first"]
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise ValueError("no token ids")
        if not isinstance(first, (str, type(None))):
            raise ValueError("no message")
        return {"ids": ids, "first": first}
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} is not a saved conversation.") from error
