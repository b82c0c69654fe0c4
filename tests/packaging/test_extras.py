"""What messages say of packages that are missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_diffkv import extras

PACKAGE = Path(extras.__file__).parent


def test_a_checkout_is_installed_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert extras.install("eval") == "pip install -e '.[eval]'"
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    assert extras.install("eval") == "pip install 'hf-diffkv[eval]'"


def test_all_messages_say_it_alike() -> None:
    extra = re.compile(r"hf-diffkv\[")
    assert [path.name for path in PACKAGE.rglob("*.py") if extra.search(path.read_text())] == ["extras.py"]
