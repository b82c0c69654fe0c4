"""Selection of cases: each kernel once or twice by default, all of them with HF_DIFFKV_ALL_PTX=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

ALL = os.environ.get("HF_DIFFKV_ALL_PTX") == "1"


def cases(names: str, always: Sequence[Any], others: Sequence[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over what always runs, and over the others if all are wanted."""
    chosen = [*always, *(others if ALL else ())]
    return pytest.mark.parametrize(
        names, chosen, ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)
    )
