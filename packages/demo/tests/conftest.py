"""The browser in which the tests of the demo look at its page."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from browser import launched
from demo_page import PROMPT, both_runs

from hf_diffkv import DiffKVConfig


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def runs() -> SimpleNamespace:
    """alpha_low prunes some tokens."""
    return both_runs(PROMPT, DiffKVConfig(alpha_high=2.0, alpha_low=0.05))
