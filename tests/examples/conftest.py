"""The browser in which the tests of the demo look at its page."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from demo_page import CHROMIUM, PROMPT, WAIT_MS, both_runs

from hf_diffkv import DiffKVConfig


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs() -> SimpleNamespace:
    """alpha_low prunes some tokens."""
    return both_runs(PROMPT, DiffKVConfig(alpha_high=2.0, alpha_low=0.05))
