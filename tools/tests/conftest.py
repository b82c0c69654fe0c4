"""Imports scripts of tools/ by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="module")
def tool(request: pytest.FixtureRequest) -> ModuleType:
    """The script that a test file is about."""
    return importlib.import_module(request.path.stem.removeprefix("test_"))
