"""Shared by all tests: poisoned memory, so that reading what nobody wrote shows."""

from __future__ import annotations

import os

# read when triton is first imported; on a GPU run the tests with TRITON_INTERPRET=0
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from hf_diffkv.memory import PagePool

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new pages with 0xFF bytes: NaN metadata and scores, absurd positions."""
    add_pages = PagePool._add_pages

    def poison(self: PagePool, count: int) -> None:
        first = self.capacity
        add_pages(self, count)
        self.pages[first : self.capacity] = 0xFF

    monkeypatch.setattr(PagePool, "_add_pages", poison)
