"""How to install what is optional."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def install(extra: str) -> str:
    """The command that installs an extra: of the checkout where this runs from one, which no index has."""
    package = "-e '.[{}]'" if (ROOT / "pyproject.toml").is_file() else "'hf-diffkv[{}]'"
    return f"pip install {package.format(extra)}"
